"""Messages on the terminal while the server starts and stops."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

from cairn.engine.messages import Ready

Say = Callable[[str], None]
UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
LABEL = 12


class Report:
    """Start-up in lines.

    Args:
        say: shows one line at once.
    """

    def __init__(self, say: Say) -> None:
        self._shown = say

    def listening(self, model: str, url: str, admin: str | None = None) -> None:
        """The ports are bound; nothing is loaded."""
        self._say(f"loading {model}")
        self._row("API", f"{url}  (503 until it is ready)")
        if admin is not None:
            self._row("admin", admin)
        self._say("start-up")

    def phase(self, name: str, seconds: float) -> None:
        """A phase of the start-up has ended."""
        self._row(name, f"{seconds:.2f} s")

    def loaded(self, info: Ready, sampling: Mapping[str, float] | None = None) -> None:
        """The engine is there: what it chose, what the model recommends to requests that do not
        say, and where the memory goes."""
        self._say("choices")
        for choice in info.choices:
            self._say(f"  {choice}")
        if sampling:
            told = ", ".join(f"{name}={value:g}" for name, value in sampling.items())
            self._say(f"  sampling defaults: {told} (generation_config.json)")
        self._say("memory")
        for name, count in info.memory:
            self._row(name, f"{readable(count):>12}")
        self._row("in all", f"{readable(sum(count for _, count in info.memory)):>12}")
        tokens = info.page_size - 1 if info.landmarks else info.page_size
        self._say(
            f"  {info.num_pages:,} pages of {tokens} tokens hold {info.num_pages * tokens:,} "
            f"tokens, one sequence at most {info.max_model_len:,}"
        )
        self._say(f"  too much or too little? {info.memory_flag} changes the pages")

    def ready(self, url: str, seconds: float) -> None:
        """Requests are served from now on."""
        self._say(f"ready after {seconds:.1f} s: {url}")

    def stopping(self, count: int, seconds: float) -> None:
        """The server was told to stop while `count` requests run."""
        if count:
            self._say(
                f"stopping: {count} requests get {seconds:g} s to finish; again stops at once"
            )
        else:
            self._say("stopping")

    def cut(self, count: int) -> None:
        """Requests were still running when the time was up."""
        self._say(f"{count} requests were cut off (--shutdown-timeout gives more time)")

    def _say(self, line: str) -> None:
        # A closed stdout (`| head`) must not stop the server.
        with contextlib.suppress(OSError):
            self._shown(line)

    def _row(self, label: str, text: str) -> None:
        self._say(f"  {label:<{LABEL}}{text}")


def readable(count: float) -> str:
    """Bytes with a unit: 1536 -> "1.5 KiB"."""
    unit = 0
    while count >= 1024 and unit < len(UNITS) - 1:
        count /= 1024
        unit += 1
    return f"{count:,.0f} {UNITS[unit]}" if unit == 0 else f"{count:,.1f} {UNITS[unit]}"
