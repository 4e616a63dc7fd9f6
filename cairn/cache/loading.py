"""Brings a prefix from host memory back into the device's prefix cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cairn.cache.host import PAGE, STATE, WINDOW, HostCache, page_names
from cairn.cache.radix import Mark, Node, PageKeys, Tokens

if TYPE_CHECKING:
    from cairn.cache.paged import PageCache


def load_prefix(
    cache: PageCache, host: HostCache, tokens: Tokens, most: int, marks: Sequence[Mark]
) -> None:
    """Load the longest prefix of at most `most` pages that device and host hold together into the
    prefix tree, so that `PageCache.open` can resume from it. Does nothing if the device already
    holds all of it, or if there is no space for the rest."""
    while True:
        prefix = _Prefix.of(cache, host, tokens, most, marks)
        end = prefix.resumable()
        if end <= prefix.resumable_on_device() or _load(prefix, end):
            return


@dataclass(slots=True)
class _Prefix:
    """Leading pages of a sequence that are on the device or in host memory.

    Attributes:
        tokens, marks: of the sequence.
        keys: keys of its pages.
        found: pages in the prefix tree.
        names: names of all pages that are in either.
    """

    cache: PageCache
    host: HostCache
    tokens: Tokens
    marks: Sequence[Mark]
    keys: PageKeys
    found: list[int]
    names: list[bytes]

    @classmethod
    def of(
        cls, cache: PageCache, host: HostCache, tokens: Tokens, most: int, marks: Sequence[Mark]
    ) -> _Prefix:
        """Look it up."""
        per_page = cache.slots.tokens_per_page
        limit = max(0, min(most, len(tokens) // per_page))
        keys = PageKeys(tokens, limit, per_page, marks)
        found = cache.tree.match(tokens, limit, marks)
        names = [host.name_of(page) for page in found]
        while len(names) < limit:
            parent = names[-1] if names else host.root
            (name,) = page_names(parent, (keys[len(names)],))
            if name not in host.slots[PAGE].kept:
                break
            names.append(name)
        return cls(cache, host, tokens, marks, keys, found, names)

    def resumable_on_device(self) -> int:
        """Number of leading pages that a sequence can resume from with what is on the device."""
        return self.cache.resumable(self.found)

    def resumable(self) -> int:
        """Number of leading pages that a sequence could resume from if all records were on the
        device."""
        end, before = len(self.names), -1
        while end != before:
            before = end
            if self.cache.states is not None:
                end = next((i for i in range(end, 0, -1) if self._has(STATE, i - 1)), 0)
            if self.cache.window is not None:
                at = end
                while at > max(0, end - self.cache.window.reach):
                    at -= 1
                    if not self._has(WINDOW, at):
                        end = at
        return end

    def on_device(self, kind: int, page: int) -> bool:
        """Whether the record of this kind for a page (logical index) is on the device."""
        beside = self.cache.window if kind == WINDOW else self.cache.states
        return page < len(self.found) and beside is not None and self.found[page] in beside.beside

    def _has(self, kind: int, page: int) -> bool:
        return self.on_device(kind, page) or self.names[page] in self.host.slots[kind].kept


@dataclass(slots=True)
class _Places:
    """Device memory reserved for a prefix.

    Attributes:
        node: end of its pages in the tree; locked.
        held: window pages of these that it resumes from.
        pages, window: logical index -> device index of the record.
        state: likewise, for the last page; None: it is on the device, or there is none.
    """

    node: Node
    held: list[int]
    pages: dict[int, int] = field(default_factory=dict)
    window: dict[int, int] = field(default_factory=dict)
    state: int | None = None

    def records(self, names: Sequence[bytes], last: int) -> list[tuple[int, bytes, int]]:
        """(kind, name, device index) of all records to load."""
        wanted = [(PAGE, names[i], page) for i, page in self.pages.items()]
        wanted += [(WINDOW, names[i], page) for i, page in self.window.items()]
        return wanted + ([] if self.state is None else [(STATE, names[last], self.state)])


def _load(prefix: _Prefix, end: int) -> bool:
    """Load the missing records of the first `end` pages; False: some were damaged."""
    cache, host, names = prefix.cache, prefix.host, prefix.names
    there = min(end, len(prefix.found))
    node, _ = cache.tree.acquire(prefix.tokens, there, prefix.marks)
    missing, near, state = list(range(there, end)), [], False
    held: list[int] = []
    if cache.window is not None:
        reach = range(max(0, end - cache.window.reach), end)
        near = [i for i in reach if not prefix.on_device(WINDOW, i)]
        there_too = [prefix.found[i] for i in reach if prefix.on_device(WINDOW, i)]
        held = cache.window.hold(there_too)
    if cache.states is not None:
        state = not prefix.on_device(STATE, end - 1)
    # Evictions to make space must not evict the records that are about to be loaded.
    kept = [(PAGE, i) for i in missing] + [(WINDOW, i) for i in near]
    kept += [(STATE, end - 1)] if state else []
    holds = [(kind, host.slots[kind].hold(names[i])) for kind, i in reversed(kept)]
    places = _take(cache, _Places(node, held), missing, near, state)
    for kind, slot in holds:
        host.slots[kind].release(slot)
    if places is None:
        return True
    whole = host.load(places.records(names, end - 1))
    _settle(prefix, places, end, whole)
    return whole


def _take(
    cache: PageCache, places: _Places, missing: list[int], near: list[int], state: bool
) -> _Places | None:
    """Reserve device memory for pages, window pages and the state; None: not enough, nothing was
    reserved."""
    window, states = cache.window, cache.states
    fits = len(missing) <= cache.num_free + cache.num_evictable
    fits &= window is None or len(near) <= window.available
    if fits and state and states is not None:
        places.state = states.take()
        fits = places.state is not None
    if not fits:
        cache.tree.release(places.node)
        if window is not None:
            window.release(places.held, wanted=True)
        return None
    places.pages = dict(zip(missing, cache.take(len(missing)), strict=True))
    if window is not None:
        places.window = dict(zip(near, window.take(len(near)), strict=True))
    return places


def _settle(prefix: _Prefix, places: _Places, end: int, whole: bool) -> None:
    """Add loaded pages to the prefix tree, or free them."""
    cache, fresh, node = prefix.cache, list(places.pages.values()), places.node
    if whole:
        parent = prefix.found[end - len(fresh) - 1] if end > len(fresh) else None
        keys = [prefix.keys[i] for i in places.pages]
        node, _ = cache.tree.extend(node, keys, fresh)
        prefix.host.name_pages(parent, keys, fresh)
    else:
        cache.allocator.free(fresh)
    pages = prefix.found[: end - len(fresh)] + fresh
    if cache.window is not None:
        if whole:
            near = list(places.window)
            cache.window.attach([pages[i] for i in near], places.window.values())
        cache.window.release([*places.held, *places.window.values()], wanted=whole)
    if cache.states is not None and places.state is not None:
        if whole:
            cache.states.attach(pages[end - 1], places.state, wanted=True)
        else:
            cache.states.free((places.state,))
    cache.tree.release(node)
