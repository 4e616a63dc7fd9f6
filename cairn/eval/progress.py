"""A progress bar on stderr, in tokens, which disappears at the end."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class Bar:
    """A progress bar with a note, shown on a terminal only. A context manager.

    Args:
        name: label of the bar.
        total: total number of tokens.
    """

    def __init__(self, name: str, total: int) -> None:
        self._name = name
        self._total = total
        self._bars: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            self._bars = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=30),
                TextColumn("{task.completed:,.0f}/{task.total:,.0f} tokens"),
                TimeElapsedColumn(),
                TextColumn("{task.fields[note]}", style="dim"),
                console=Console(stderr=True),
                transient=True,
            )
            self._bars.start()
            self._task = self._bars.add_task(self._name, total=self._total, note="")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def advance(self, tokens: int, note: str = "") -> None:
        """Advance the bar by `tokens`."""
        if self._bars is not None and self._task is not None:
            self._bars.update(self._task, advance=tokens, note=note)
