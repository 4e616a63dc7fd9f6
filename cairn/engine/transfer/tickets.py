"""Rights of other engines to records in host memory."""

from __future__ import annotations

import queue
import secrets
import threading
import time
from dataclasses import dataclass

from cairn.cache.host import HostCache

TICKET_SECONDS = 30.0
"""Seconds after which an unused ticket expires."""


@dataclass(slots=True)
class Ticket:
    """A right to read records, which stay in host memory as long as the ticket is valid.

    Attributes:
        records: (kind, name) -> place.
        deadline: when it expires (time.monotonic).
        used: whether a peer is being served.
    """

    records: dict[tuple[int, bytes], int]
    deadline: float
    used: bool = False


class Tickets:
    """All tickets. The engine's loop issues them and gives their records back (`reap`); threads
    that serve others claim and end them.

    Args:
        host: holds the records.
        seconds: time after which an unused ticket expires.
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
        """Issue a ticket for records that the caller holds; the ticket takes over the holds."""
        name = secrets.token_bytes(16)
        with self._lock:
            self._open[name] = Ticket(records, time.monotonic() + self._seconds)
        return name

    def claim(self, name: bytes) -> Ticket | None:
        """Claim a ticket exclusively; None: it was used, has expired or never existed."""
        with self._lock:
            ticket = self._open.get(name)
            if ticket is None or ticket.used or ticket.deadline < time.monotonic():
                return None
            ticket.used = True
            return ticket

    def end(self, name: bytes) -> None:
        """End a claimed ticket."""
        with self._lock:
            self._ended.put(self._open.pop(name))

    def reap(self) -> None:
        """Release the records of tickets that have ended or expired."""
        now = time.monotonic()
        with self._lock:
            expired = [n for n, t in self._open.items() if not t.used and t.deadline < now]
            for name in expired:
                self._ended.put(self._open.pop(name))
        while not self._ended.empty():
            for (kind, _), slot in self._ended.get().records.items():
                self._host.slots[kind].release(slot)
