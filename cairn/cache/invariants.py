"""Checks the page ledger: each page is free, cached or owned, exactly once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from cairn.cache.host import HostCache
from cairn.cache.paged import Lease, PageCache
from cairn.cache.radix import Node, RadixTree
from cairn.cache.states import StateSnapshots
from cairn.cache.window import WindowPages
from cairn.errors import InvariantError


@dataclass(frozen=True, slots=True)
class WindowReport:
    """Counts of the window layers' pool.

    Attributes:
        num_pages: pages of the pool.
        free: pages that hold nothing.
        kept: pages that no lease holds, beside cached pages.
        held: pages that leases hold.
        leaked: page ids that are in none of these.
    """

    num_pages: int
    free: int
    kept: int
    held: int
    leaked: tuple[int, ...]

    def __str__(self) -> str:
        return (
            f"{self.num_pages} window pages: {self.free} free, {self.kept} kept, {self.held} held"
        )


@dataclass(frozen=True, slots=True)
class SnapshotReport:
    """Counts of the snapshots of recurrent states.

    Attributes:
        count: snapshots that there is memory for.
        free: unused ones.
        kept: those beside pages of the prefix tree.
        written: those being written by steps in flight.
        leaked: snapshots that are in none of these.
    """

    count: int
    free: int
    kept: int
    written: int
    leaked: tuple[int, ...]

    def __str__(self) -> str:
        return (
            f"{self.count} snapshots: {self.free} free, {self.kept} kept, "
            f"{self.written} being written"
        )


@dataclass(frozen=True, slots=True)
class HostReport:
    """Counts of the slots for records of one kind in host memory.

    Attributes:
        count: number of slots.
        free: those that hold nothing.
        kept: those with records.
        taken: reserved ones.
        leaked: slots that are in none of these.
    """

    count: int
    free: int
    kept: int
    taken: int
    leaked: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.count} host records: {self.kept} kept, {self.taken} to come"


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a check, counted in pages unless said.

    Attributes:
        num_pages: the pool.
        free, cached, owned: claims found by walking the free list, the prefix tree and the leases.
        evictable: cached pages that no lease locks.
        leases, nodes: open leases, and nodes of the prefix tree besides its root.
        leaked: page ids that nobody claims.
        contested: page ids claimed more than once.
        window: counts of the window layers' pool; None without one.
        snapshots: counts of the snapshots of recurrent states, None without such layers.
        problems: one line for every broken rule, empty when all is well.
        host: counts of the records in host memory, by kind; empty without them.
    """

    num_pages: int
    free: int
    cached: int
    owned: int
    evictable: int
    leases: int
    nodes: int
    leaked: tuple[int, ...]
    contested: tuple[int, ...]
    window: WindowReport | None
    snapshots: SnapshotReport | None
    problems: tuple[str, ...]
    host: tuple[HostReport, ...] = ()

    def __str__(self) -> str:
        counts = (
            f"{self.num_pages} pages: {self.free} free, {self.cached} cached "
            f"({self.evictable} evictable, {self.nodes} nodes), "
            f"{self.owned} owned by {self.leases} leases"
        )
        others = [str(part) for part in (self.window, self.snapshots, *self.host) if part]
        return "; ".join((counts, *others, *self.problems))


def check(cache: PageCache, leases: Iterable[Lease]) -> Report:
    """Verify the ledger and the prefix tree; a broken rule raises InvariantError with the report.

    Args:
        leases: every open lease. Walks all data structures: for tests, idle times and debugging,
            not for every step.
    """
    report = examine(cache, leases)
    if report.problems:
        raise InvariantError(str(report))
    return report


def examine(cache: PageCache, leases: Iterable[Lease]) -> Report:
    """The same verification without raising: broken rules are listed in the report."""
    leases = list(leases)
    tree = cache.tree
    nodes = _nodes(tree.root)
    free = list(cache.allocator.free_pages)
    cached = [page for node in nodes for page in node.pages]
    owned = [page for lease in leases for page in lease.owned]
    evictable = sum(len(node.pages) for node in nodes if not node.locked)
    problems = _tree_problems(tree, nodes, leases)
    for lease in leases:
        problems += _lease_problems(lease)
    for name, counted, kept in (
        ("cached", len(cached), tree.num_cached),
        ("evictable", evictable, tree.num_evictable),
        ("owned", len(owned), cache.num_owned),
    ):
        if counted != kept:
            problems.append(f"{counted} {name} pages, the counter says {kept}")
    flagged = sum(cache.allocator.is_free(page) for page in range(cache.num_pages))
    if flagged != len(free):
        problems.append(f"{flagged} pages are marked free, the free list has {len(free)}")

    claims: dict[int, int] = dict.fromkeys(range(cache.num_pages), 0)
    for page in (*free, *cached, *owned):
        claims[page] = claims.get(page, 0) + 1
    leaked = tuple(page for page, n in claims.items() if n == 0)
    contested = tuple(page for page, n in claims.items() if n > 1)
    unknown = tuple(page for page in claims if not 0 <= page < cache.num_pages)
    for name, pages in (("leaked", leaked), ("contested", contested), ("unknown", unknown)):
        if pages:
            problems.append(f"{name} pages {list(pages)}")
    window = None
    if cache.window is not None:
        window, broken = _examine_window(cache.window, leases, set(cached))
        problems += broken
    snapshots = None
    if cache.states is not None:
        snapshots, broken = _examine_snapshots(cache.states, leases, set(cached))
        problems += broken
    host: tuple[HostReport, ...] = ()
    if cache.host is not None:
        host, broken = _examine_host(cache.host, set(cached))
        problems += broken
    return Report(
        num_pages=cache.num_pages,
        free=len(free),
        cached=len(cached),
        owned=len(owned),
        evictable=evictable,
        leases=len(leases),
        nodes=len(nodes),
        leaked=leaked,
        contested=contested,
        window=window,
        snapshots=snapshots,
        problems=tuple(problems),
        host=host,
    )


def _examine_window(
    window: WindowPages, leases: list[Lease], cached: set[int]
) -> tuple[WindowReport, list[str]]:
    """Each page of the window layers is free, held or kept, and belongs to one cached page."""
    users = Counter(page for lease in leases for page in lease.window)
    free, kept = set(window.allocator.free_pages), window.kept()
    everything = range(window.num_pages)
    problems = []
    if any(window.users[page] != users[page] for page in everything) or users.keys() - everything:
        problems.append("window pages have other users than the leases say")
    claims = Counter((*window.allocator.free_pages, *kept, *users))
    leaked = tuple(page for page in everything if not claims[page])
    contested = [page for page, count in claims.items() if count > 1]
    for name, pages in (("leaked", leaked), ("contested", contested)):
        if pages:
            problems.append(f"{name} window pages {list(pages)}")
    if any(window.allocator.is_free(page) != (page in free) for page in everything):
        problems.append("window pages are wrongly marked free, or wrongly not")
    beside = list(window.beside.values())
    if len(set(beside)) != len(beside) or set(beside) & free:
        problems.append("window pages beside cached pages are free or shared")
    if window.beside.keys() - cached:
        problems.append("window pages lie beside pages that are not cached")
    if not set(kept) <= set(beside):
        problems.append("window pages are kept beside nothing")
    for lease in leases:
        if lease.committed and lease.window_first > max(0, lease.committed - window.reach):
            problems.append("a lease lacks window pages before its end")
        for page, mine in zip(lease.pages[lease.window_first :], lease.window, strict=True):
            if page in cached and page in window.beside and window.beside[page] != mine:
                problems.append(f"a lease holds another window page than is beside page {page}")
    return WindowReport(len(everything), len(free), len(kept), len(users), leaked), problems


def _examine_snapshots(
    states: StateSnapshots, leases: list[Lease], cached: set[int]
) -> tuple[SnapshotReport, list[str]]:
    """Each snapshot is free, attached to one cached page, or being written for one lease; the
    eviction order lists every page with a snapshot once."""
    written = [snapshot for lease in leases for snapshot in lease.snapshots.values()]
    free, beside = list(states.allocator.free_pages), list(states.beside.values())
    claims = Counter((*free, *beside, *written))
    everything, problems = range(states.count), []
    leaked = tuple(snapshot for snapshot in everything if not claims[snapshot])
    contested = [snapshot for snapshot, count in claims.items() if count > 1]
    unknown = [snapshot for snapshot in claims if snapshot not in everything]
    for name, found in (("leaked", leaked), ("contested", contested), ("unknown", unknown)):
        if found:
            problems.append(f"{name} snapshots {list(found)}")
    if any(states.allocator.is_free(n) != (n in free) for n in everything):
        problems.append("snapshots are wrongly marked free, or wrongly not")
    if states.beside.keys() - cached:
        problems.append("snapshots lie beside pages that are not cached")
    if sorted(states.kept()) != sorted(states.beside):
        problems.append("the order in which snapshots are given up lists other pages than have one")
    resumes = [lease.resumes for lease in leases if lease.resumes is not None]
    if states.resuming != Counter(page for page, _ in resumes):
        problems.append("other sequences are about to resume than the leases say")
    if any(states.beside.get(page) != snapshot for page, snapshot in resumes):
        problems.append("a lease resumes from a snapshot that was given up")
    for lease in leases:
        if not lease.trailing <= lease.snapshots.keys():
            problems.append("a lease lets go of a snapshot that it does not write")
    counts = len(everything), len(free), len(beside), len(written)
    return SnapshotReport(*counts, leaked), problems


def _examine_host(host: HostCache, cached: set[int]) -> tuple[tuple[HostReport, ...], list[str]]:
    """Each place is free, taken or keeps one record; every page of the tree has a name."""
    reports, problems = [], []
    for slots in host.slots:
        free, kept = list(slots.allocator.free_pages), list(slots.kept.values())
        claims = Counter((*free, *kept, *slots.taken))
        everything = range(slots.allocator.num_pages)
        leaked = tuple(slot for slot in everything if not claims[slot])
        if leaked or claims.total() != len(claims) or claims.keys() - everything:
            problems.append(f"places for host records are leaked {list(leaked)} or contested")
        if slots.held.keys() - set(kept):
            problems.append("places for host records are held, but keep none")
        counts = len(everything), len(free), len(kept), len(slots.taken)
        reports.append(HostReport(*counts, leaked))
    if host.names.keys() != cached:
        problems.append("other pages have names than are cached")
    return tuple(reports), problems


def _nodes(root: Node) -> list[Node]:
    """Every node below the root, parents first."""
    nodes = [root]
    for node in nodes:
        nodes += node.children.values()
    return nodes[1:]


def _tree_problems(tree: RadixTree, nodes: list[Node], leases: list[Lease]) -> list[str]:
    problems = []
    ends = Counter(lease.node for lease in leases)
    queued = tree.queued()
    if not ends.keys() <= {tree.root, *nodes}:
        problems.append("a lease ends at a node that is not in the tree")
    for node in (tree.root, *nodes):
        where = f"the node of pages {node.pages[:4]}"
        if node.leases != ends[node]:
            problems.append(f"{where} counts {node.leases} leases, {ends[node]} end there")
        if node.locked != node.leases + sum(child.locked for child in node.children.values()):
            problems.append(f"{where} has a wrong lock count {node.locked}")
        for key, child in node.children.items():
            if child.parent is not node or not child.keys or child.keys[0] != key:
                problems.append(f"{where} has a child with a wrong parent or key")
    for node in nodes:
        where = f"the node of pages {node.pages[:4]}"
        if len(node.keys) != len(node.pages) or len(node.keys[0]) < 4 * tree.tokens_per_page:
            problems.append(f"{where} has {len(node.pages)} pages for {len(node.keys)} keys")
        if (not node.children and not node.locked) != (node in queued):
            problems.append(f"{where} is wrongly queued for eviction, or wrongly not")
        problems += [f"{where} {text}" for text in _age_problems(node)]
    return problems


def _age_problems(node: Node) -> list[str]:
    """Violations of the order of last uses among evictable nodes: a parent is never older than its
    children."""
    if node.locked or not node.children:
        return []
    newest = max(child.last_use for child in node.children.values())
    if newest > node.last_use:
        return ["was used less recently than what continues it"]
    if newest == node.last_use and len(node.children) == 1:
        return ["should be merged with its only child"]
    return []


def _lease_problems(lease: Lease) -> list[str]:
    """A lease's committed pages are the tree's on its path, or its own duplicates of them."""
    if lease.closed:
        return ["a closed lease is listed as open"]
    path: list[int] = []
    node: Node | None = lease.node
    while node is not None:
        path[:0] = node.pages
        node = node.parent
    if len(path) != lease.committed:
        return [f"a lease with {lease.committed} committed pages ends {len(path)} pages deep"]
    differing = [mine for mine, kept in zip(lease.pages, path, strict=False) if mine != kept]
    if differing != lease.duplicates:
        return [f"a lease's pages {differing} differ from the tree's, it owns {lease.duplicates}"]
    return []
