"""`cairn ray`: the server on a cluster of Ray."""

from __future__ import annotations

from pathlib import Path

import click


@click.group()
def ray() -> None:
    """Serve on a cluster of Ray."""


@ray.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def serve(file: Path) -> None:
    """Serve the model of FILE on Ray Serve, until Ctrl-C.

    FILE is TOML: model, replicas or [autoscaling], [engine], [server] and [resources]; see
    docs/deployment.md. RAY_ADDRESS names the cluster; without one there is one of this machine.
    """
    from cairn.server.ray import read_plan, serve_on_ray

    serve_on_ray(read_plan(file), click.echo)
