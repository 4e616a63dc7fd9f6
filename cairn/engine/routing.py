"""Routing of prompts to replicas, by cached prefixes and by load. No torch here."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Literal

from cairn.cache.radix import Mark, page_keys

Balance = Literal["auto", "round_robin", "shortest_queue"]
BALANCES: tuple[Balance, ...] = ("auto", "round_robin", "shortest_queue")

KEY_BYTES = 16
OVERLOAD = 1.25
"""A replica with the cached prefix is not used when its load exceeds this times the least load,
plus one."""


class Router:
    """Chooses replicas.

    "auto": the replica that has seen the longest prefix of the prompt, unless its load is too far
    above the least; if none has, the least loaded. "shortest_queue": the least loaded.
    "round_robin": in turn. Ties go to the least recently chosen.

    For each replica the router keeps the most recent prefixes of 1, 2, 4, 8, ... complete pages, at
    most as many as its cache has pages. This estimates the contents of its cache; an error costs a
    prefill.

    Args:
        balance: see above.
        tokens_per_page: user tokens of a page.
        pages: pages of each replica's cache.
    """

    def __init__(self, balance: Balance, tokens_per_page: int, pages: Sequence[int]) -> None:
        self._balance = balance
        self._per_page = tokens_per_page
        self._pages = pages
        self._seen: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in pages]
        self._chosen = [0] * len(pages)
        self._count = 0

    def keys(self, prompt: Sequence[int], marks: Sequence[Mark] = ()) -> list[bytes]:
        """Hashes of the prompt's prefixes of 1, 2, 4, ... complete pages; none where they do not
        matter.

        Raises BadRequest for an id that does not fit 32 bits.
        """
        if self._balance != "auto":
            return []
        found, digest, first, last = [], blake2b(digest_size=KEY_BYTES), 0, 1
        while last * self._per_page <= len(prompt):
            for key in page_keys(prompt, first, last, self._per_page, marks):
                digest.update(key)
            found.append(digest.digest())
            first, last = last, 2 * last
        return found

    def choose(self, keys: Sequence[bytes], loads: Mapping[int, int]) -> int:
        """The replica for a prompt.

        Args:
            keys: of the prompt.
            loads: continuations held by each eligible replica; at least one replica.
        """
        if self._balance == "round_robin":
            return min(loads, key=self._chosen.__getitem__)
        least = self._least(loads, loads)
        for key in reversed(keys):
            knowing = [replica for replica in loads if key in self._seen[replica]]
            if knowing:
                best = self._least(knowing, loads)
                return best if loads[best] <= OVERLOAD * loads[least] + 1 else least
        return least

    def note(self, replica: int, keys: Sequence[bytes]) -> None:
        """Record that the replica received a prompt with these keys."""
        self._count += 1
        self._chosen[replica] = self._count
        seen = self._seen[replica]
        for key in reversed(keys):
            seen[key] = None
            seen.move_to_end(key)
        while len(seen) > self._pages[replica]:
            seen.popitem(last=False)

    def forget(self, replica: int) -> None:
        """Forget the prefixes of a replica whose cache was lost."""
        self._seen[replica].clear()

    def _least(self, replicas: Sequence[int] | Mapping[int, int], loads: Mapping[int, int]) -> int:
        return min(replicas, key=lambda replica: (loads[replica], self._chosen[replica]))
