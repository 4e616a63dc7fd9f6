"""`cairn inspect`: a model's geometry, its memory, and how many tokens fit this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from cairn.cli.options import (
    engine_arguments,
    engine_options,
    json_option,
    model_argument,
    model_or_default,
)
from cairn.obs.units import readable


@click.command()
@model_argument
@json_option
@engine_options
def inspect(model: Path | None, as_json: bool, **options: Any) -> None:
    """Show MODEL's geometry and its memory on this machine.

    Reports the memory per token and page, and how many tokens fit. Engine options have the effect
    that they have in the engine. No weights are loaded.
    """
    from cairn.bench.inspection import inspection

    report = inspection(model_or_default(model), engine_arguments(options))
    if as_json:
        click.echo(json.dumps(report, default=str))
        return
    for title, content in report.items():
        click.echo(title)
        rows = content if isinstance(content, list) else [*content.items()]
        for row in rows:
            click.echo(f"  {_line(title, row)}")


def _line(title: str, row: Any) -> str:
    if isinstance(row, str):
        return row
    if isinstance(row, dict):
        return f"{row['name']} = {row['value']}  ({row['from']})"
    name, value = row
    if title == "layers":
        return f"{name:<12}{value}"
    if "bytes" in name:
        value = readable(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        value = f"{value:,}"
    label = name.replace("_bytes_", " ").replace("bytes_", "").replace("_bytes", "")
    return f"{label.replace('_', ' '):<20}{value}"
