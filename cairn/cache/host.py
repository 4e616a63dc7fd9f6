"""The host prefix cache: records, in host memory, of pages that the device's prefix cache evicted.

A record is found by the name of its page: a hash over all tokens up to the page's end. Names of a
prefix form a chain, so a prefix is looked up page by page from its root. There are three kinds of
records: of pages, of window layers' pages and of recurrent states, the last two kept beside a page
as on the device. This module keeps the ledger; the executor owns the bytes and moves them between
device and host (`Mover`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

from cairn.cache.allocator import PageAllocator

PAGE, WINDOW, STATE = 0, 1, 2
"""Kinds of records; the first two equal the indices of the page groups."""
KINDS = (PAGE, WINDOW, STATE)


class Move(NamedTuple):
    """A move of a record between a device index and a slot in host memory.

    Attributes:
        kind: of the record.
        page: page, window page or snapshot on the device.
        slot: place in host memory.
    """

    kind: int
    page: int
    slot: int


NAME_BYTES = 16
"""Of the name of a page."""
Mover = Callable[[Sequence[Move], bool], Sequence[Move]]
"""Executes moves after all steps launched so far and before later ones; True: into host memory.
Returns the moves to the device whose records were damaged; their targets on the device must not be
used."""


def page_names(parent: bytes, keys: Iterable[bytes]) -> list[bytes]:
    """Names of consecutive pages.

    Args:
        parent: name of the page before them; of the first page of a sequence: that of the model.
        keys: exact keys of the pages, see `cairn.cache.radix.page_keys`.
    """
    names = []
    for key in keys:
        parent = blake2b(parent + key, digest_size=NAME_BYTES).digest()
        names.append(parent)
    return names


class HostSlots:
    """Slots for records of one kind: each is free, reserved for a record, or keeps one.

    Args:
        count: number of slots.

    Attributes:
        kept: name -> slot of its record, least recently used first.
        held: slot -> number of holds, which prevent its eviction.
        taken: reserved slots.
        evicted: number of evicted records.
    """

    def __init__(self, count: int) -> None:
        self.allocator = PageAllocator(count)
        self.kept: OrderedDict[bytes, int] = OrderedDict()
        self.held: Counter[int] = Counter()
        self.taken: set[int] = set()
        self.evicted = 0

    def take(self) -> int | None:
        """Reserve a slot, evicting the least recently used record that is not held if necessary;
        None: all are held."""
        if not self.allocator.num_free:
            name = next((n for n, slot in self.kept.items() if slot not in self.held), None)
            if name is None:
                return None
            self.forget(name)
            self.evicted += 1
        (slot,) = self.allocator.take(1)
        self.taken.add(slot)
        return slot

    def keep(self, name: bytes, slot: int) -> None:
        """Record that a reserved slot now keeps the record of this name. If another slot keeps an
        equal one, this slot is freed."""
        self.taken.remove(slot)
        if name in self.kept:
            self.allocator.free((slot,))
        else:
            self.kept[name] = slot

    def touch(self, name: bytes) -> None:
        """Mark the record of this name, if any, as most recently used."""
        if name in self.kept:
            self.kept.move_to_end(name)

    def give_back(self, slot: int) -> None:
        """Free a reserved slot that received no record."""
        self.taken.remove(slot)
        self.allocator.free((slot,))

    def forget(self, name: bytes) -> None:
        """Evict a record."""
        self.allocator.free((self.kept.pop(name),))

    def hold(self, name: bytes) -> int:
        """Hold a record until `release` and mark it as most recently used; returns its slot."""
        self.kept.move_to_end(name)
        slot = self.kept[name]
        self.held[slot] += 1
        return slot

    def release(self, slot: int) -> None:
        """Undo one `hold`."""
        self.held[slot] -= 1
        if not self.held[slot]:
            del self.held[slot]


class HostCache:
    """The ledger of records in host memory, and the names of the pages in the device's prefix tree.

    Args:
        counts: number of slots, by kind.
        move: executes moves.
        root: name before the first page of every sequence: that of the model.
        spills: records of pages that the device gives up are stored; else only those that are asked
            for are.

    Attributes:
        slots: by kind.
        names: page of the prefix tree -> its name.
        stored, loaded: records that were moved into host memory and out of it.
        damaged: records whose checksum failed when they were loaded.
    """

    def __init__(
        self, counts: Sequence[int], move: Mover, root: bytes = b"", spills: bool = True
    ) -> None:
        self.slots, self._spills = tuple(map(HostSlots, counts)), spills
        self.names: dict[int, bytes] = {}
        self.root = root
        self.stored = self.loaded = self.damaged = 0
        self._move = move

    def name_pages(self, parent: int | None, keys: Iterable[bytes], pages: Sequence[int]) -> None:
        """Name pages that entered the prefix tree below the page `parent`; None: its root."""
        names = page_names(self.name_of(parent), keys)
        self.names.update(zip(pages, names, strict=True))

    def name_of(self, page: int | None) -> bytes:
        """The name of a page of the prefix tree; None: of its root."""
        return self.root if page is None else self.names[page]

    def store(self, kind: int, records: Iterable[tuple[int, int]]) -> None:
        """Store records that the device gives up, as far as slots are available.

        Args:
            records: (page of the prefix tree, device index of its page, window page or snapshot).
        """
        if self._spills:
            for slot in self.keep(kind, records).values():
                self.slots[kind].release(slot)

    def keep(self, kind: int, records: Iterable[tuple[int, int]]) -> dict[tuple[int, bytes], int]:
        """Store records; returns (kind, name) -> slot of the stored ones, all of them held. Args:
        see `store`."""
        slots, moves, held = self.slots[kind], [], {}
        for page, index in records:
            name = self.names[page]
            if name not in slots.kept:
                slot = slots.take()
                if slot is None:
                    break
                slots.keep(name, slot)
                moves.append(Move(kind, index, slot))
            held[kind, name] = slots.hold(name)
        if moves:
            self._move(moves, True)
            self.stored += len(moves)
        return held

    def load(self, wanted: Sequence[tuple[int, bytes, int]]) -> bool:
        """Move records to the device; all or nothing.

        Args:
            wanted: (kind, name, index on the device); host memory has all of them.

        Returns False if some were damaged; these are dropped, and the device targets must not be
        used.
        """
        moves = [Move(kind, index, self.slots[kind].kept[name]) for kind, name, index in wanted]
        damaged = set(self._move(moves, False))
        for (kind, name, _), move in zip(wanted, moves, strict=True):
            if move in damaged:
                self.slots[kind].forget(name)
        self.damaged += len(damaged)
        self.loaded += 0 if damaged else len(moves)
        return not damaged

    def drop(self, pages: Iterable[int]) -> None:
        """Forget the names of pages that the prefix tree evicted."""
        for page in pages:
            del self.names[page]

    def clear(self) -> None:
        """Evict every record that is not held."""
        for slots in self.slots:
            for name in [n for n, slot in slots.kept.items() if slot not in slots.held]:
                slots.forget(name)
