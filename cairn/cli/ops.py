"""`cairn ops`: lists the ops and their implementations."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from cairn.cli.options import json_option
from cairn.errors import BadConfig

REMEDY = "Give a file that `cairn bench ops` has written"


@click.command()
@json_option
@click.option(
    "--docs",
    type=click.Path(path_type=Path),
    help="Write one page for each family of ops to this folder.",
)
@click.option(
    "--measured",
    type=click.Path(path_type=Path, exists=True),
    multiple=True,
    help="Records of `cairn bench ops` to include in the pages; repeatable, later files override.",
)
def ops(as_json: bool, docs: Path | None, measured: tuple[Path, ...]) -> None:
    """List the ops and the implementations that devices run.

    CAIRN_OPS=reference runs the definitions of all ops; CAIRN_OPS=NAME=IMPLEMENTATION forces one.
    """
    # Set before the ops are imported, so that GPU kernels are listed on machines without a GPU.
    os.environ.setdefault("TRITON_INTERPRET", "0")
    from cairn.bench import registered as _registered  # noqa: F401  (registers the ops)
    from cairn.ops.listing import table
    from cairn.ops.registry import check_forced

    check_forced()
    if measured and docs is None:
        raise click.UsageError("--measured is for the pages: give --docs too")
    if docs is not None:
        _write_pages(docs, measured)
        return
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
    for row in rows:
        for implementation in row.implementations:
            if implementation.missing:
                click.echo(f"no {implementation.name} for {row.op} here: {implementation.missing}")


def _write_pages(folder: Path, measured: Sequence[Path]) -> None:
    from cairn.ops.docs import pages

    texts = pages([record for file in measured for record in _records(file)])
    folder.mkdir(parents=True, exist_ok=True)
    for old in _pages_of(folder) - {folder / name for name in texts}:
        old.unlink()
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    click.echo(f"{len(texts)} pages in {folder}")


def _records(file: Path) -> list[dict[str, Any]]:
    """Read records of `cairn bench ops`. Raises BadConfig for any other file."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadConfig(f"{file} is not JSON: {error}", REMEDY) from None
    if not isinstance(found, list) or not all(
        isinstance(record, dict) and {"op", "size"} <= record.keys() for record in found
    ):
        raise BadConfig(f"{file} holds no records of ops", REMEDY)
    return found


def _pages_of(folder: Path) -> set[Path]:
    """The generated pages in a folder. Raises BadConfig if it contains other Markdown files."""
    from cairn.ops.docs import GENERATED, INDEX

    found, index = set(folder.glob("*.md")), folder / INDEX
    if found and not (index in found and GENERATED in index.read_text(encoding="utf-8")):
        raise BadConfig(
            f"{folder} holds files that are not pages of ops", "Give a folder of their own"
        )
    return found
