"""Memory and file descriptors of a process and its descendants, read from /proc."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from cairn.errors import BadConfig

PROC = Path("/proc")
COMMAND_CHARS = 48


@dataclass(frozen=True, slots=True)
class ProcessState:
    """A process at one moment.

    Attributes:
        pid: its number.
        command: its command line, shortened.
        rss: resident bytes.
        fds: open file descriptors.
    """

    pid: int
    command: str
    rss: int
    fds: int


def process_tree(pid: int) -> list[ProcessState]:
    """The process and its descendants, parents first; empty when it has ended.

    Raises:
        BadConfig: there is no /proc here, or the process belongs to somebody else.
    """
    if not (PROC / "self/stat").exists():
        raise BadConfig("processes cannot be watched: this system has no /proc", "Run on Linux")
    children = _children()
    states, queue = [], [pid]
    for number in queue:
        state = _state(number)
        if state is not None:
            states.append(state)
        queue += children.get(number, [])
    return states if states and states[0].pid == pid else []


def _children() -> dict[int, list[int]]:
    """Parent -> children, over all processes."""
    found: dict[int, list[int]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdecimal():
            fields = _stat(int(entry.name))
            if fields is not None:
                found.setdefault(int(fields[1]), []).append(int(entry.name))
    return found


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the state on; None when the process has ended."""
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The process name in front of the fields may contain spaces and parentheses.
    return text[text.rindex(")") + 2 :].split()


def _state(pid: int) -> ProcessState | None:
    folder = PROC / str(pid)
    fields = _stat(pid)
    if fields is None or fields[0] == "Z":
        return None
    try:
        pages = int((folder / "statm").read_text(encoding="utf-8").split()[1])
        words = (folder / "cmdline").read_bytes().split(b"\0")
        fds = sum(1 for _ in (folder / "fd").iterdir())
    except PermissionError as error:
        raise BadConfig(
            f"process {pid} cannot be watched: {error}", "Run as the user that started it"
        ) from error
    except (FileNotFoundError, ProcessLookupError):
        return None
    return ProcessState(pid, _short(words), pages * os.sysconf("SC_PAGE_SIZE"), fds)


def _short(words: list[bytes]) -> str:
    """The command line with file names instead of paths."""
    parts = [Path(word.decode(errors="replace")).name for word in words if word]
    return " ".join(parts)[:COMMAND_CHARS]
