"""Progress bar on stderr: requests done, or seconds elapsed."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from cairn.bench.serve.load import every

REFRESH_SECONDS = 0.2

View = Callable[[], tuple[float, str]]
"""Returns the progress and a note."""


@asynccontextmanager
async def progress_bar(name: str, total: float | None, view: View) -> AsyncIterator[None]:
    """Show `view()` a few times a second while the block runs; nothing without a terminal.

    Args:
        name: of the work.
        total: of what `view` counts; None: not known.
        view: see View.
    """
    if not sys.stderr.isatty():
        yield
        return

    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        TextColumn("{task.completed:,.0f}" + (f"/{total:,.0f}" if total is not None else "")),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}", style="dim"),
        console=Console(stderr=True),
    )
    with bar:
        task = bar.add_task(name, total=total, note="")

        async def show() -> None:
            done, note = view()
            bar.update(task, completed=done, note=note)

        async with every(REFRESH_SECONDS, show):
            yield
        await show()
