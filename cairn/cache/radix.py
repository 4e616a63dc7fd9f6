"""A prefix tree over complete pages: which prefixes are cached, and in which physical pages.

An edge holds a run of pages (path compression). A page is identified by all of its user tokens,
never by a hash alone. A lease ends at the end of an edge: where it would end inside one, the edge
is split. So a lease pins exactly the pages that it uses, and every cost except comparing tokens is
proportional to edges.

The rules that hold between any two calls (checked by `cairn.cache.invariants`):
- `node.locked` counts the leases that end at the node or below it, `node.leases` those that end
  right there;
- a page can be evicted if and only if `locked` of its node is 0, and then only from the tail of a
  leaf;
- `last_use` never grows from parent to child among unlocked nodes, so a leaf is always the least
  recent of its path.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cairn.errors import BadRequest, InvariantError

Tokens = Sequence[int] | npt.NDArray[np.integer]
"""User token ids: a list, an `array.array` or a numpy array; 32 bits need no conversion."""


class Mark(NamedTuple):
    """Placeholder tokens whose ids do not identify their content, such as those of an image.

    Attributes:
        first, end: range of the tokens, `end` exclusive.
        name: identifies the content.
    """

    first: int
    end: int
    name: bytes


def page_keys(
    tokens: Tokens, first: int, last: int, tokens_per_page: int, marks: Sequence[Mark] = ()
) -> list[bytes]:
    """Exact keys of pages first .. last - 1 of a sequence: the page's ids as native int32 bytes,
    followed by every mark that touches it, with its position.

    Raises BadRequest for an id that does not fit 32 bits.
    """
    run = tokens[first * tokens_per_page : last * tokens_per_page]
    try:
        if isinstance(run, np.ndarray):
            narrow = run.astype(np.int32, copy=False)
            if run.dtype != np.int32 and bool((narrow != run).any()):
                raise OverflowError("token id")
            data = narrow.tobytes()
        elif isinstance(run, array) and run.typecode == "i":
            data = run.tobytes()
        else:
            data = array("i", run).tobytes()
    except OverflowError:
        raise BadRequest("token ids must fit 32 bits") from None
    size = 4 * tokens_per_page
    keys = [data[i : i + size] for i in range(0, len(data), size)]
    for mark in marks:
        begin, end = mark.first // tokens_per_page, -(-mark.end // tokens_per_page)
        for page in range(max(first, begin), min(first + len(keys), end)):
            place = mark.first - page * tokens_per_page, mark.end - page * tokens_per_page
            keys[page - first] += b"".join(n.to_bytes(8, "little", signed=True) for n in place)
            keys[page - first] += mark.name
    return keys


class PageKeys:
    """Keys of the first `count` pages of a sequence, converted in growing runs when asked for.

    So the cost of a lookup depends on the length of the match, not of the prompt.
    """

    def __init__(
        self, tokens: Tokens, count: int, tokens_per_page: int, marks: Sequence[Mark] = ()
    ) -> None:
        self._tokens = tokens
        self._marks = marks
        self._count = count
        self._tokens_per_page = tokens_per_page
        self._known: list[bytes] = []

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, page: int) -> bytes:
        known = self._known
        if page >= len(known):
            last = min(self._count, max(page + 1, 2 * len(known)))
            size, marks = self._tokens_per_page, self._marks
            known += page_keys(self._tokens, len(known), last, size, marks)
        return known[page]


class Node:
    """An edge of the tree together with the node at its end.

    Attributes:
        parent: None for the root and for a node that left the tree.
        children: by the key of their first page.
        keys, pages: the run of pages on the edge, token keys and physical ids; empty for the root
            only.
        leases: leases that end here.
        locked: leases that end here or below.
        last_use: the tree's clock when a lease through this node was last released.
    """

    __slots__ = ("children", "keys", "last_use", "leases", "locked", "pages", "parent")

    def __init__(
        self, parent: Node | None, keys: list[bytes], pages: list[int], last_use: int
    ) -> None:
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.keys = keys
        self.pages = pages
        self.leases = 0
        self.locked = 0
        self.last_use = last_use


class RadixTree:
    """Prefix tree over pages of `tokens_per_page` tokens; owns its pages until `evict` returns
    them.

    Attributes:
        root: the empty prefix; never evicted.
        num_cached: number of pages in the tree.
        num_evictable: number of pages that no lease locks.
    """

    def __init__(self, tokens_per_page: int) -> None:
        self.tokens_per_page = tokens_per_page
        self.root = Node(None, [], [], 0)
        self.num_cached = 0
        self.num_evictable = 0
        self._clock = 0
        self._heap: list[tuple[int, int, Node]] = []
        self._pushed = 0
        self._heap_limit = 64

    def acquire(
        self, tokens: Tokens, max_pages: int, marks: Sequence[Mark] = ()
    ) -> tuple[Node, list[int]]:
        """Find and lock the longest cached prefix of complete pages, at most `max_pages` of them.

        Returns the node where it ends (the root for no page) and its physical pages.
        """
        node, length, pages = self._find(tokens, max_pages, marks)
        node = self._split(node, length)
        self._lock(node, None)
        node.leases += 1
        return node, pages

    def match(self, tokens: Tokens, max_pages: int, marks: Sequence[Mark] = ()) -> list[int]:
        """The pages that `acquire` would find, without locking them."""
        return self._find(tokens, max_pages, marks)[2]

    def extend(self, node: Node, keys: list[bytes], pages: list[int]) -> tuple[Node, list[int]]:
        """Move a lease that ends at `node` down by the given pages, adding what the tree lacks.

        Args:
            node: where the lease ends; stands for all tokens before `keys`.
            keys: keys of the next pages of the lease.
            pages: their physical ids, one per key.

        Returns the node where the lease ends now and the tree's pages for the keys: the given ones
        where they were added, the tree's own where it already has equal ones. Pages after those are
        still added below the equal ones: keys and values of a page depend on the tokens up to its
        end only, so it does not matter which copy of them is above it.
        """
        if not keys:
            return node, []
        start, done = node, 0
        held: list[int] = []
        while done < len(keys):
            child = node.children.get(keys[done])
            if child is None:
                child = Node(node, keys[done:], pages[done:], self._clock)
                node.children[keys[done]] = child
                self.num_cached += len(child.pages)
                self.num_evictable += len(child.pages)
            else:
                child = self._split(child, _shared(child.keys, keys, done))
            held += child.pages
            done += len(child.pages)
            node = child
        self._lock(node, start)
        node.leases += 1
        start.leases -= 1
        self._merge(start)
        return node, held

    def path(self, node: Node) -> list[int]:
        """The pages of the prefix that ends at `node`, from the first on."""
        edges = [node.pages]
        while node.parent is not None:
            node = node.parent
            edges.append(node.pages)
        return [page for pages in reversed(edges) for page in pages]

    def release(self, node: Node) -> None:
        """Unlock a lease that ends at `node` and mark its prefix as the most recently used.

        Raises InvariantError when no lease ends there.
        """
        if node.leases == 0:
            raise InvariantError("a lease was released twice")
        node.leases -= 1
        self._clock += 1
        step: Node | None = node
        while step is not None:
            step.locked -= 1
            step.last_use = self._clock
            if step.locked == 0:
                self.num_evictable += len(step.pages)
            above = step.parent
            self._merge(step)
            step = above
        self._offer(node)

    def evict(self, count: int) -> list[int]:
        """Remove and return up to `count` unlocked pages: least recently used first, tails before
        heads."""
        evicted: list[int] = []
        while len(evicted) < count and self._heap:
            entry = self._heap[0]
            node = entry[2]
            if not _current(entry):
                heapq.heappop(self._heap)
                continue
            kept = max(0, len(node.pages) - (count - len(evicted)))
            evicted += reversed(node.pages[kept:])
            if kept:
                del node.keys[kept:], node.pages[kept:]
            else:
                heapq.heappop(self._heap)
                self._remove(node)
        self.num_cached -= len(evicted)
        self.num_evictable -= len(evicted)
        return evicted

    def queued(self) -> set[Node]:
        """The leaves that `evict` would find, for the invariant check."""
        return {entry[2] for entry in self._heap if _current(entry)}

    def _find(
        self, tokens: Tokens, max_pages: int, marks: Sequence[Mark]
    ) -> tuple[Node, int, list[int]]:
        """The edge in which the longest cached prefix ends, how far into it, and its pages."""
        limit = max(0, min(len(tokens) // self.tokens_per_page, max_pages))
        keys = PageKeys(tokens, limit, self.tokens_per_page, marks)
        node, length = self.root, 0
        pages: list[int] = []
        while len(pages) < limit and length == len(node.pages):
            child = node.children.get(keys[len(pages)])
            if child is None:
                break
            node, length = child, _shared(child.keys, keys, len(pages))
            pages += node.pages[:length]
        return node, length, pages

    def _lock(self, node: Node, until: Node | None) -> None:
        """Count one more lease at `node` and at every ancestor below `until`."""
        step: Node | None = node
        while step is not until and step is not None:
            if step.locked == 0:
                self.num_evictable -= len(step.pages)
            step.locked += 1
            step = step.parent

    def _split(self, node: Node, length: int) -> Node:
        """The node that ends `length` pages into `node`'s edge; `node` stays the lower part."""
        if length == len(node.pages):
            return node
        parent = _parent(node)
        upper = Node(parent, node.keys[:length], node.pages[:length], node.last_use)
        upper.locked = node.locked
        parent.children[upper.keys[0]] = upper
        del node.keys[:length], node.pages[:length]
        upper.children[node.keys[0]] = node
        node.parent = upper
        return upper

    def _merge(self, node: Node) -> None:
        """Merge `node` with its only child if they have the same leases; the child object stays.

        An unlocked child that was used less recently is not merged, because `node` would then be
        evicted as early as the child.
        """
        parent = node.parent
        if parent is None or node.leases or len(node.children) != 1:
            return
        (child,) = node.children.values()
        if not child.locked and child.last_use != node.last_use:
            return
        # The lists of the upper node are extended in place: merging one page must not copy the
        # whole prefix.
        node.keys += child.keys
        node.pages += child.pages
        child.keys, child.pages = node.keys, node.pages
        child.parent = parent
        parent.children[child.keys[0]] = child
        _retire(node)

    def _remove(self, node: Node) -> None:
        """Remove an unlocked leaf; its parent may become a leaf, or merge with its last child."""
        parent = _parent(node)
        del parent.children[node.keys[0]]
        _retire(node)
        self._merge(parent)
        self._offer(parent)

    def _offer(self, node: Node) -> None:
        """Queue `node` for eviction if it is an unlocked leaf."""
        if node.parent is None or node.children or node.locked:
            return
        self._pushed += 1
        heapq.heappush(self._heap, (node.last_use, self._pushed, node))
        if len(self._heap) > self._heap_limit:
            self._heap = [entry for entry in self._heap if _current(entry)]
            heapq.heapify(self._heap)
            self._heap_limit = 64 + 2 * len(self._heap)


def _shared(edge: list[bytes], keys: PageKeys | list[bytes], start: int) -> int:
    """Length of the common head of `edge` and `keys[start:]`; their first keys are known equal."""
    length = 1
    top = min(len(edge), len(keys) - start)
    while length < top and edge[length] == keys[start + length]:
        length += 1
    return length


def _current(entry: tuple[int, int, Node]) -> bool:
    """Whether a queue entry is still valid: its node was not used since, is not locked and not
    removed."""
    last_use, _, node = entry
    return node.last_use == last_use and node.locked == 0 and node.parent is not None


def _parent(node: Node) -> Node:
    if node.parent is None:
        raise InvariantError("the root of the prefix tree was split or evicted")
    return node.parent


def _retire(node: Node) -> None:
    """Clear a node that left the tree, so that stale references are noticed."""
    node.parent = None
    node.children = {}
    node.keys = []
    node.pages = []
