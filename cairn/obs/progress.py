"""Progress bars of generation: prompt tokens and generated tokens with their rates."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import Task, TaskID
    from rich.text import Text


class Progress:
    """Two progress bars on stderr, if it is a terminal. A context manager.

    Args:
        total_prompt_tokens: prompt tokens of all requests, in user tokens.
        enabled: False disables the bars.
        total_generated_tokens: upper bound of generated tokens, None if unknown.
    """

    def __init__(
        self,
        total_prompt_tokens: int,
        enabled: bool = True,
        total_generated_tokens: int | None = None,
    ) -> None:
        self.enabled = enabled and sys.stderr.isatty()
        self._totals = (total_prompt_tokens, total_generated_tokens)
        self._bars: RichProgress | None = None
        self._tasks: list[TaskID] = []

    def __enter__(self) -> Self:
        if self.enabled:
            self._bars = _make_bars()
            self._bars.start()
            prompt, generated = self._totals
            self._tasks = [
                self._bars.add_task("prefill", total=prompt, note=""),
                self._bars.add_task("decode", total=generated, note="", start=False),
            ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def update(
        self,
        *,
        prefilled: int | None = None,
        generated: int | None = None,
        running: int | None = None,
        waiting: int | None = None,
    ) -> None:
        """Update the bars; None leaves a value unchanged.

        Args:
            prefilled: prompt tokens computed or read from the prefix cache so far.
            generated: tokens generated so far.
            running: requests in the running batch.
            waiting: requests in the queue.
        """
        if self._bars is None:
            return
        prefill, decode = self._tasks
        if prefilled is not None:
            self._bars.update(prefill, completed=prefilled)
        if generated:
            self._bars.start_task(decode)
            self._bars.update(decode, completed=generated)
        if running is not None or waiting is not None:
            self._bars.update(decode, note=f"{running or 0} running, {waiting or 0} waiting")


def _make_bars() -> RichProgress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        ProgressColumn,
        TextColumn,
        TimeElapsedColumn,
    )
    from rich.progress import Progress as RichProgress
    from rich.text import Text

    class Rate(ProgressColumn):
        """Tokens per second."""

        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text(f"{speed:,.0f} tokens/s" if speed else "", style="progress.data.speed")

    return RichProgress(
        TextColumn("{task.description:>8}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        Rate(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}", style="dim"),
        console=Console(stderr=True),
    )
