"""The memory plan: weights and steps first, pages in the rest."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, replace

from cairn.cache.landmarks import SlotMap
from cairn.cache.schema import CacheSchema
from cairn.config import GIB, EngineConfig, EngineOptions
from cairn.errors import BadConfig, OutOfMemory
from cairn.specs.choice import Choice
from cairn.specs.model import ModelSpec

PAGES_FLAG = "kv_cache_memory (--kv-cache-memory)"
HOST_FLAG = "kv_host_memory (--kv-host-memory)"
SHARE_FLAG = "gpu_memory_utilization (--gpu-memory-utilization)"
SNAPSHOT_SHARE = 0.3
"""Share of the cache's memory, beside running rows, that snapshots of recurrent states take."""
Lines = tuple[tuple[str, int], ...]

QUERIES_AT_ONCE = 512
"""Queries that attend to host pages at once: there are frames for the selected pages of this many
queries, if memory allows."""
WINDOW_SHARE = 8
"""One in this many pages of cached prefixes has a page of the window layers' own pool too: enough
for the windows at the ends of prefixes of 5000 tokens."""


@dataclass(frozen=True, slots=True)
class Usage:
    """GPU memory used besides the pages, in bytes. Nothing is guessed: values that were not
    measured are 0.

    Attributes:
        total: memory of the device.
        others: CUDA itself, compiled kernels and other processes.
        weights: the model's parameters.
        activations: peak memory of the largest steps.
        graphs: memory that the graphs of all decode steps keep.
        records: memory for pages that are transferred to other engines.
    """

    total: int
    others: int
    weights: int
    activations: int = 0
    graphs: int = 0
    records: int = 0

    @property
    def taken(self) -> int:
        """Everything except pages."""
        return self.others + self.weights + self.activations + self.graphs + self.records

    def __str__(self) -> str:
        parts = [
            ("other uses", self.others),
            ("weights", self.weights),
            ("activations", self.activations),
            ("graphs", self.graphs),
            ("records", self.records),
        ]
        said = ", ".join(f"{name} {gib(count)}" for name, count in parts if count)
        return f"of {gib(self.total)}: {said}"


@dataclass(frozen=True, slots=True)
class Room:
    """Memory for pages.

    Attributes:
        bytes: available bytes; 0 or less if the rest alone does not fit.
        flag: the option that sets it.
        usage: other memory in use on a GPU; None on the CPU.
    """

    bytes: int
    flag: str
    usage: Usage | None = None

    def __str__(self) -> str:
        if self.bytes <= 0:
            return f"nothing is left {self.usage}"
        if self.flag == PAGES_FLAG:
            return f"kv_cache_memory is {self.bytes}"
        return f"{self.bytes} are left ({self.usage})"


@dataclass(frozen=True, slots=True)
class PageBytes:
    """Bytes of a page, and of a sequence's recurrent state.

    Attributes:
        shared: bytes per page of the layers that keep all pages of a sequence.
        window: bytes per page of the layers that keep only the pages inside their window; 0: no
            such layers.
        reach: pages before its own that a query of these layers reads.
        row: bytes of one sequence's state in all recurrent layers.
        host: bytes per page in host memory (host tier); 0: none.
        selected: frames that a query needs of each head; a frame of all layers takes `host` bytes.
    """

    shared: int
    window: int = 0
    reach: int = 0
    row: int = 0
    host: int = 0
    selected: int = 0

    @classmethod
    def of(cls, schema: CacheSchema) -> PageBytes:
        """Of all layers."""
        shared, *windowed = [group.page_bytes for group in schema.groups] or [0]
        window = sum(windowed), schema.reach or 0
        return cls(shared, *window, schema.row_bytes, schema.host_bytes, schema.selected)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The number of pages and the longest sequence.

    Attributes:
        num_pages: pages of the pool.
        bytes_per_page: keys, values and summaries of all layers that share the pages.
        window_pages: pages of the window layers' own pool, 0 without one.
        bytes_per_window_page: fields of those layers.
        states: number of recurrent states in memory: running rows, one for padding, snapshots.
        snapshots: of these, those kept at page borders of cached prefixes.
        bytes_per_state: state of one sequence in all recurrent layers; 0 without such layers.
        frames: frames on the device for pages in host memory; 0: no host tier.
        bytes_per_host_page: bytes of a page in host memory, and of a frame, over all layers.
        max_model_len: longest sequence in user tokens, prompt and output together.
        flag: the option that changes how many pages there are, as a command line has it.
        choices: the automatic values with their reasons.
    """

    num_pages: int
    bytes_per_page: int
    window_pages: int
    bytes_per_window_page: int
    max_model_len: int
    flag: str
    choices: tuple[Choice, ...]
    states: int = 0
    snapshots: int = 0
    bytes_per_state: int = 0
    frames: int = 0
    bytes_per_host_page: int = 0

    @property
    def host_bytes(self) -> int:
        """Bytes of all pages in host memory."""
        return self.num_pages * self.bytes_per_host_page

    @property
    def group_pages(self) -> tuple[int, ...]:
        """Number of pages by page group."""
        return (self.num_pages, self.window_pages) if self.window_pages else (self.num_pages,)

    def with_host_rate(self, rate: float) -> MemoryPlan:
        """The plan with a choice that says how fast, in bytes a second, the device reads pages in
        host memory."""
        reason = "a copy of pages from host memory was measured"
        choice = Choice("host_read_rate", f"{rate / 1e9:.1f} GB/s", reason)
        return replace(self, choices=(*self.choices, choice))

    def table(self, weights: int, usage: Usage | None) -> Lines:
        """(what, bytes) of everything in the memory; on a GPU the sum is the whole device.

        Args:
            weights: bytes of the weights.
            usage: GPU memory used besides the pages; None on the CPU.
        """
        pages = self.num_pages * self.bytes_per_page
        own = self.window_pages * self.bytes_per_window_page
        states, frames = self.states * self.bytes_per_state, self.frames * self.bytes_per_host_page
        parts = (("pages", pages), ("window pages", own), ("frames", frames), ("states", states))
        held = tuple(part for part in parts if part[1] or part[0] == "pages")
        if usage is None:
            return (("weights", weights), *held)
        lines = (
            ("weights", usage.weights),
            ("activations", usage.activations),
            ("graphs", usage.graphs),
            ("records", usage.records),
            *held,
            ("other uses", usage.others),
            ("free", usage.total - usage.taken - pages - own - frames - states),
        )
        return tuple((what, count) for what, count in lines if count or what == "free")


def room_for_pages(config: EngineConfig, usage: Usage | None) -> Room:
    """Bytes that pages may take.

    Args:
        config: resolved options.
        usage: GPU memory used besides the pages, as far as it is known; None on the CPU.

    Raises:
        OutOfMemory: the GPU has less left than `kv_cache_memory` asks for.
    """
    if usage is None:
        assert config.kv_cache_memory is not None
        return Room(config.kv_cache_memory, PAGES_FLAG)
    asked, share = config.kv_cache_memory, config.gpu_memory_utilization
    left = int(usage.total * (1.0 if share is None else share)) - usage.taken
    if asked is None:
        return Room(left, SHARE_FLAG, usage)
    if asked > left > 0:
        raise OutOfMemory(
            f"kv_cache_memory is {asked}, but no more than {left} are free {usage}",
            f"Set {PAGES_FLAG} to at most {left}",
        )
    return Room(min(asked, left), PAGES_FLAG, usage)


def check_length(options: EngineOptions, model: ModelSpec) -> None:
    """Refuse a max_model_len beyond the model's limit.

    Raises:
        BadConfig: naming the longest.
    """
    asked = options.max_model_len
    if asked is not None and asked > model.max_model_len:
        raise BadConfig(
            f"max_model_len is {asked}, but the model was made for {model.max_model_len} tokens",
            f"Use at most {model.max_model_len}, or --allow-long-max-model-len",
        )


def check_pages(plan: MemoryPlan, slots: SlotMap, most: int | None) -> None:
    """Refuse rows that are too long for the kernels of a GPU: without them a step takes seconds,
    and cannot be a graph.

    Args:
        most: most pages of a row; None: no limit.

    Raises:
        BadConfig: naming the longest row.
    """
    pages = int(slots.pages_for(plan.max_model_len))
    if most is not None and pages > most:
        raise BadConfig(
            f"max_model_len is {plan.max_model_len}, but the GPU's kernels select from at most "
            f"{most} pages of a sequence, and it has {pages}",
            f"Set max_model_len (--max-model-len) to at most {most * slots.tokens_per_page}",
        )


def plan_memory(
    options: EngineOptions,
    config: EngineConfig,
    model: ModelSpec,
    page_bytes: PageBytes,
    room: Room,
) -> MemoryPlan:
    """Plan the pages that fit into `room`, next to the states of all rows and of snapshots; never
    more than all rows at full length can use.

    Args:
        page_bytes: bytes of a page.
        room: memory for pages.

    Raises:
        BadConfig: `max_model_len` is longer than the model was made for.
        OutOfMemory: the room does not hold one sequence of the asked length.
    """
    check_length(options, model)
    choices: list[Choice] = []
    asked = options.max_model_len
    longest = asked or model.max_model_len
    tokens_per_page = SlotMap(config.page_size, model.landmarks).tokens_per_page
    useful = config.max_num_seqs * -(-longest // tokens_per_page)
    least = -(-(asked or 1) // tokens_per_page)
    pools = _Pools.of(page_bytes, config)
    states = (config.max_num_seqs + 1) * page_bytes.row
    if states and states > room.bytes:
        raise OutOfMemory(
            f"states of {config.max_num_seqs} sequences need {states} bytes, but {room}",
            "Lower max_num_seqs (--max-num-seqs)",
        )
    snapshots = _snapshots(room.bytes - states, page_bytes, config, choices)
    left = room.bytes - states - snapshots * page_bytes.row
    if page_bytes.host:
        useful = min(useful, _host_pages(least, page_bytes, config))
    num_pages, window_pages = pools.divide(max(0, left), least, useful)
    capacity = num_pages * tokens_per_page
    if num_pages < least:
        need = pools.need(least) + states
        what = "one page" if asked is None else f"one sequence of max_model_len {asked}"
        raise OutOfMemory(
            f"{what} needs {need} bytes of pages, but {room}",
            _remedy(room, need, pools.need(1), config),
        )
    if room.flag == SHARE_FLAG:
        reason = f"that is what weights and steps leave of {config.gpu_memory_utilization} of it"
        choices.append(Choice("kv_cache_memory", f"{room.bytes / GIB:.2f}GiB", reason))
    if asked is None and capacity < longest:
        longest = capacity
        holder = "kv_host_memory" if page_bytes.host else "kv_cache_memory"
        reason = f"that is what {holder} holds in one sequence"
        choices.append(Choice("max_model_len", longest, reason))
    elif asked is None:
        choices.append(Choice("max_model_len", longest, "the model was made for it"))
    frames = 0
    if page_bytes.host:
        frames = pools.frames(max(0, left), num_pages, window_pages)
        reason = (
            f"that is what {num_pages} summaries and {window_pages} window pages leave; "
            f"{gib(num_pages * page_bytes.host)} of pages lie in host memory"
        )
        choices.append(Choice("frames", frames, reason))
    flag = "--kv-cache-memory SIZE" if room.flag == PAGES_FLAG else "--gpu-memory-utilization SHARE"
    counts = (num_pages, page_bytes.shared, window_pages, page_bytes.window)
    plan = MemoryPlan(*counts, longest, flag, tuple(choices))
    if page_bytes.host:
        plan = replace(plan, frames=frames, bytes_per_host_page=page_bytes.host)
    if not page_bytes.row:
        return plan
    total = config.max_num_seqs + 1 + snapshots
    return replace(plan, states=total, snapshots=snapshots, bytes_per_state=page_bytes.row)


def _host_pages(least: int, page_bytes: PageBytes, config: EngineConfig) -> int:
    """Number of pages in host memory."""
    found = config.kv_host_memory // page_bytes.host
    if found < least:
        raise OutOfMemory(
            f"{least} pages need {least * page_bytes.host} bytes of host memory, but "
            f"kv_host_memory is {config.kv_host_memory}",
            f"Raise {HOST_FLAG} to at least {least * page_bytes.host}",
        )
    return found


def _snapshots(
    room: int, page_bytes: PageBytes, config: EngineConfig, choices: list[Choice]
) -> int:
    """Number of state snapshots that fit into SNAPSHOT_SHARE of the room."""
    if not (page_bytes.row and config.enable_prefix_caching):
        return 0
    count = int(room * SNAPSHOT_SHARE) // page_bytes.row
    reason = (
        f"{SNAPSHOT_SHARE:.0%} of kv_cache_memory keeps states of {page_bytes.row} bytes at page "
        "borders of cached prefixes"
    )
    choices.append(Choice("state_snapshots", count, reason))
    return count


def check_host(plan: MemoryPlan, free: int) -> None:
    """Refuse more pages than the host has memory for. The OS assigns memory at the first write: an
    engine with too many pages would be killed while serving.

    Raises:
        OutOfMemory: naming the largest size.
    """
    held = sum(count for _, count in plan.table(0, None))
    if held > free:
        raise OutOfMemory(
            f"the pages take {held} bytes, but no more than {free} are free",
            f"Set {PAGES_FLAG} to at most {free}",
        )


def pages_in(room: int, page_bytes: PageBytes, config: EngineConfig) -> int:
    """Number of pages that fit into `room` bytes, next to the states of all rows and of snapshots
    and the window layers' pages."""
    room -= (config.max_num_seqs + 1) * page_bytes.row
    room -= _snapshots(max(0, room), page_bytes, config, []) * page_bytes.row
    return _Pools.of(page_bytes, config).divide(max(0, room), 1, max(0, room))[0]


@dataclass(frozen=True, slots=True)
class _Pools:
    """Division of memory between pages and the window layers' own pages.

    Attributes:
        page_bytes: bytes of a page of each.
        step: most window pages of one sequence: those of the largest step and those of the window
            before it.
    """

    page_bytes: PageBytes
    step: int

    @classmethod
    def of(cls, page_bytes: PageBytes, config: EngineConfig) -> _Pools:
        """The division for this engine's steps."""
        chunk = config.chunked_prefill_size // config.page_size
        return cls(page_bytes, page_bytes.reach + chunk + 2)

    def need(self, pages: int) -> int:
        """Bytes that one sequence of `pages` pages needs."""
        return self._bytes(pages, min(pages, self.step))

    def divide(self, room: int, least: int, useful: int) -> tuple[int, int]:
        """(pages, window pages) that fit into `room` bytes: at most `useful` pages, or at least
        `least` at the cost of kept window pages, or fewer where those do not fit at all."""
        counts = range(1, useful + 1)
        pages = bisect_right(counts, room, key=lambda n: self._bytes(n, self._wanted(n)))
        if pages < least:
            pages = least if self.need(least) <= room else 0
        if not self.page_bytes.window:
            return pages, 0
        left = room - pages * self.page_bytes.shared
        if self.page_bytes.host:
            return pages, min(pages, self._wanted(pages), self._beside_frames(left))
        return pages, min(pages, left // self.page_bytes.window)

    def frames(self, room: int, pages: int, window_pages: int) -> int:
        """Number of frames that fit next to these pages, no more than can be used."""
        left = room - pages * self.page_bytes.shared - window_pages * self.page_bytes.window
        most = max(pages, QUERIES_AT_ONCE * self.page_bytes.selected)
        return min(most, left // self.page_bytes.host)

    def _beside_frames(self, room: int) -> int:
        """Number of window pages that fit next to as many frames, at least the minimum."""
        fewest = self.page_bytes.selected * self.page_bytes.host
        half = max(room // 2, min(room - fewest, self.step * self.page_bytes.window))
        return min(half, room - fewest) // self.page_bytes.window

    def _wanted(self, pages: int) -> int:
        return min(pages, self.step + pages // WINDOW_SHARE)

    def _bytes(self, pages: int, window_pages: int) -> int:
        own = pages * self.page_bytes.shared + window_pages * self.page_bytes.window
        return own + self.page_bytes.selected * self.page_bytes.host


def _remedy(room: Room, need: int, least: int, config: EngineConfig) -> str:
    """The one option that makes `need` bytes of pages fit; `least` of them are one page."""
    usage = room.usage
    if room.flag == PAGES_FLAG and (usage is None or usage.taken + need <= usage.total):
        return f"Raise {PAGES_FLAG} to at least {need}"
    assert usage is not None
    share = math.ceil(100 * (usage.taken + need) / usage.total) / 100
    if room.flag == SHARE_FLAG and share <= 1:
        return f"Raise {SHARE_FLAG} to at least {share}"
    if usage.taken + least <= usage.total and need > least:
        return "Lower max_model_len (--max-model-len)"
    if usage.activations > usage.weights:
        return (
            "Lower chunked_prefill_size (--chunked-prefill-size), which is "
            f"{config.chunked_prefill_size}"
        )
    if config.dtype == "float32":
        return "Use dtype bfloat16 (--dtype bfloat16): weights and pages take half of it"
    return "Use a device with more memory"


def gib(count: int) -> str:
    """Bytes as text: 1610612736 -> "1.50 GiB"."""
    return f"{count / GIB:.2f} GiB"
