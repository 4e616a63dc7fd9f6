"""`cairn ops`: the kernel library and what would run."""

from __future__ import annotations

import dataclasses
import json

import click

from cairn.cli.options import json_option


@click.command()
@json_option
def ops(as_json: bool) -> None:
    """List every op, its implementations, and which one each device would run.

    CAIRN_OPS=reference runs the definitions alone; CAIRN_OPS=name=implementation forces one.
    """
    from cairn import ops as _every_op  # noqa: F401  (importing the package registers its ops)
    from cairn.ops.registry import check_forced, table

    check_forced()
    rows = table()
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(row) for row in rows]))
        return

    lines: list[tuple[str, ...]] = [("family", "op", "implementations", "on cpu", "on cuda")]
    for row in rows:
        names = [*(i.name for i in row.implementations), "reference"]
        chosen = [" > ".join(row.chosen.get(device, ())) or "-" for device in ("cpu", "cuda")]
        lines.append((row.family, row.op, ", ".join(names), *chosen))
    widths = [max(map(len, column)) + 2 for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        click.echo("".join(cells).rstrip())
