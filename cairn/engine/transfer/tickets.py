"""Rights of other engines to records in host memory."""

from __future__ import annotations

import queue
import secrets
import threading
import time
from dataclasses import dataclass

from cairn.cache.host import HostCache

TICKET_SECONDS = 30.0
"""How long a ticket waits to be used."""


@dataclass(slots=True)
class Ticket:
    """A right to records, which are held in host memory as long as it lasts.

    Attributes:
        records: (kind, name) -> place.
        deadline: when it expires (time.monotonic).
        used: somebody is being served.
    """

    records: dict[tuple[int, bytes], int]
    deadline: float
    used: bool = False


class Tickets:
    """All tickets. The engine's loop issues them and gives their records back (`reap`); threads
    that serve others claim and end them.

    Args:
        host: holds the records.
        seconds: how long a ticket waits to be used.
    """

    def __init__(self, host: HostCache, seconds: float = TICKET_SECONDS) -> None:
        self._host = host
        self._seconds = seconds
        self._lock = threading.Lock()
        self._open: dict[bytes, Ticket] = {}
        self._ended: queue.SimpleQueue[Ticket] = queue.SimpleQueue()

    def __len__(self) -> int:
        return len(self._open)

    def issue(self, records: dict[tuple[int, bytes], int]) -> bytes:
        """A ticket for records that the caller holds; from now on it holds them."""
        name = secrets.token_bytes(16)
        with self._lock:
            self._open[name] = Ticket(records, time.monotonic() + self._seconds)
        return name

    def claim(self, name: bytes) -> Ticket | None:
        """The ticket, which nobody else can claim then; None: it was used, expired or never was."""
        with self._lock:
            ticket = self._open.get(name)
            if ticket is None or ticket.used or ticket.deadline < time.monotonic():
                return None
            ticket.used = True
            return ticket

    def end(self, name: bytes) -> None:
        """A claimed ticket has been served, or will not be."""
        with self._lock:
            self._ended.put(self._open.pop(name))

    def reap(self) -> None:
        """Give back the records of tickets that have ended or expired."""
        now = time.monotonic()
        with self._lock:
            expired = [n for n, t in self._open.items() if not t.used and t.deadline < now]
            for name in expired:
                self._ended.put(self._open.pop(name))
        while not self._ended.empty():
            for (kind, _), slot in self._ended.get().records.items():
                self._host.slots[kind].release(slot)
