"""Progress of a run: a bar on a terminal, otherwise lines on stderr."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from cairn.train.recipe import Recipe


class Display:
    """Displays the log lines of a run; a context manager."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            self._bar = Progress(
                BarColumn(bar_width=10),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=Console(stderr=True),
            )
            self._bar.start()
            self._task = self._bar.add_task("train", total=self.recipe.steps, note="")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, line: dict[str, float]) -> None:
        """Show one line of the log."""
        shown = [
            f"loss {line['text']:.3f}",
            f"answers {line['right']:.0%} right",
            f"rate {line['rate'] * self.recipe.rates.matrices:.4f}",
            f"{line['tokens_per_second'] / 1000:,.1f}K tokens/s",
        ]
        if self._bar is None or self._task is None:
            shown[1] += f" (loss {line['answer']:.3f})"
            shown += [f"pages {line['page_mass']:.3f}", f"{line['length']:.0f} slots"]
            sys.stderr.write(
                f"step {line['step']:.0f} of {self.recipe.steps}: {', '.join(shown)}\n"
            )
            sys.stderr.flush()
        else:
            self._bar.update(self._task, completed=int(line["step"]), note=", ".join(shown))
