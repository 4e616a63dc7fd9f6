"""`cairn ray`: serves on a Ray cluster."""

from __future__ import annotations

from pathlib import Path

import click


@click.group()
def ray() -> None:
    """Serve on a Ray cluster."""


@ray.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def serve(file: Path) -> None:
    """Serve the model of FILE on Ray Serve, until SIGTERM or Ctrl-C.

    FILE is a TOML file with model, replicas or [autoscaling], [engine], [server], [resources] and
    [prefill]; see docs/deployment.md. RAY_ADDRESS names the cluster; without it, Ray starts on this
    machine.
    """
    from cairn.server.ray import plan_of, serve_on_ray

    serve_on_ray(plan_of(file.read_text("utf-8")), click.echo)
