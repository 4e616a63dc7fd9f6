"""Lines that the server prints while it starts and stops."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

from cairn.engine.messages import Ready
from cairn.obs.units import readable

Say = Callable[[str], None]
LABEL = 12


class StartupReport:
    """Prints the progress of the start-up and the shutdown.

    Args:
        say: prints one line.
    """

    def __init__(self, say: Say) -> None:
        self._shown = say

    def listening(self, model: str, url: str, admin: str | None = None) -> None:
        """Print that the ports are bound and loading begins."""
        self._say(f"loading {model}")
        self._row("API", f"{url}  (503 until it is ready)")
        if admin is not None:
            self._row("admin", admin)
        self._say("start-up")

    def phase(self, name: str, seconds: float) -> None:
        """Print that a phase of the start-up has ended."""
        self._row(name, f"{seconds:.2f} s")

    def loaded(self, info: Ready, sampling: Mapping[str, float] | None = None) -> None:
        """Print the engine's automatic choices, the sampling defaults and the memory plan."""
        self._say("choices")
        for choice in info.choices:
            self._say(f"  {choice}")
        if sampling:
            told = ", ".join(f"{name}={value:g}" for name, value in sampling.items())
            self._say(f"  sampling defaults: {told} (generation_config.json)")
        self._say("memory")
        for name, count in info.memory:
            self._row(name, f"{readable(count):>12}")
        self._row("total", f"{readable(sum(count for _, count in info.memory)):>12}")
        tokens = info.page_size - 1 if info.landmarks else info.page_size
        self._say(
            f"  {info.num_pages:,} pages of {tokens} tokens hold {info.num_pages * tokens:,} "
            f"tokens, one sequence at most {info.max_model_len:,}"
        )
        self._say(f"  {info.memory_flag} changes the size of the page pool")

    def ready(self, url: str, seconds: float) -> None:
        """Print that requests are served."""
        self._say(f"ready after {seconds:.1f} s: {url}")

    def stopping(self, count: int, seconds: float) -> None:
        """Print that the server stops, and how long its `count` running requests may take."""
        if count:
            self._say(
                f"stopping: {count} running requests have {seconds:g} s to finish; "
                "a second signal stops at once"
            )
        else:
            self._say("stopping")

    def cut(self, count: int) -> None:
        """Print that `count` requests were aborted by the shutdown timeout."""
        self._say(f"{count} requests were cut off (--shutdown-timeout gives more time)")

    def _say(self, line: str) -> None:
        # A closed stdout (`| head`) must not stop the server.
        with contextlib.suppress(OSError):
            self._shown(line)

    def _row(self, label: str, text: str) -> None:
        self._say(f"  {label:<{LABEL}}{text}")
