"""Collectives between GPUs of one host through peer-to-peer memory.

By size: up to `WORDS` an all-gather and an all-reduce whose 8-byte words carry their own flags (as
in NCCL's LL protocol); the latter fused with RMSNorm and residual addition; and for large tensors
of two ranks copies by the copy engines, chunk by chunk, which overlap with the matrix product that
makes the next chunk. All sum in float32 in rank order, so every rank gets the same bits, and all
can be captured in CUDA graphs. Addresses come from torch's symmetric memory (alpha API). Multicast
is not used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from cairn.ops import gpu
from cairn.ops.allreduce.kernels import (
    add_normed_words_kernel,
    add_received_kernel,
    announce_kernel,
    await_free_kernel,
    gather_words_kernel,
    sum_words_kernel,
)
from cairn.ops.pdl import pdl_option

log = logging.getLogger(__name__)

WORDS = 1 << 18
"""Size of an inbox, in 4-byte words of payload: the largest tensor of the LL protocol."""
BLOCK = 256
"""Words per program."""
ROW_WORDS = 4096
"""Words of the longest row of `add_normed`."""
PARTS, PART_BYTES = 4, 36 << 20
"""Chunks in flight, and bytes of a chunk: 4,608 tokens of hidden size 4,096 in bfloat16. On two
H200s (7B, 8,192 tokens) 16 MiB took as long on the GPUs, with more launches than a slow host does
in that time."""
FLAGS_BYTES, FREED = 256, 32
"""Bytes of a slot's two int32 flags, and the index of the second one: each has its cache line."""

Norm = tuple[Tensor, float] | None
"""Weight and eps of an rmsnorm."""


class PeerSums:
    """Collectives of a group; every rank makes the same calls in the same order.

    Args:
        rank, ranks: number of this rank, and of ranks.
        memory: [memory_bytes(ranks)] uint8 of this rank, mapped by all ranks; all 0.
        addresses: of every rank's memory, as mapped in this process.
        peer: the other rank's memory if there are two ranks.
    """

    def __init__(
        self, rank: int, ranks: int, memory: Tensor, addresses: list[int], peer: Tensor | None
    ) -> None:
        self.rank, self.ranks = rank, ranks
        self._memory = memory
        device = memory.device
        inbox = _inbox_bytes(ranks)
        self._inbox = memory[:inbox].view(torch.int64)
        self._addresses = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._epochs = torch.zeros(WORDS // BLOCK, dtype=torch.int32, device=device)
        self._row_epochs = torch.zeros(WORDS // ROW_WORDS, dtype=torch.int32, device=device)
        self._parts: _Parts | None = None
        if peer is not None:
            far = addresses[1 - rank] + inbox
            self._parts = _Parts(rank, memory[inbox:], peer[inbox:], far)

    @classmethod
    def of(
        cls, store: Any, backend: Any, rank: int, ranks: int, device: torch.device
    ) -> PeerSums | None:
        """For a group on one host; None where peer memory cannot be mapped. Collective.

        Args:
            store: PrefixStore of the group.
            backend: its NCCL process group.
        """
        try:
            memory, addresses, peer = _shared(store, backend, rank, ranks, device)
        except (RuntimeError, ImportError, AttributeError, TypeError) as error:
            log.warning("ranks do not map each other's memory, NCCL sums: %s", error)
            return None
        return cls(rank, ranks, memory, addresses, peer)

    def takes(self, x: Tensor) -> bool:
        """Whether `sum` supports x."""
        size = x.nbytes
        return 0 < size <= 4 * WORDS and size % 4 == 0 and x.element_size() in (2, 4)

    def sum(self, x: Tensor, out: Tensor, add: bool = False) -> None:
        """out = sum of x over the ranks, or out += that sum; in float32, rounded once.

        Args:
            x: float32, bfloat16 or float16, contiguous, see `takes`.
            out: like x.
        """
        words = x.nbytes // 4
        pdl = gpu.supports_pdl(x.device)
        sum_words_kernel[(-(-words // BLOCK),)](
            x=x.view(-1).view(torch.int32),
            out=out,
            inbox=self._inbox,
            addresses=self._addresses,
            epochs=self._epochs,
            words=words,
            capacity=WORDS,
            RANK=self.rank,
            RANKS=self.ranks,
            BLOCK=BLOCK,
            NUMBERS=4 // x.element_size(),
            ADD=add,
            PDL=pdl,
            num_warps=2,
            **pdl_option(pdl),
        )

    def takes_gathered(self, x: Tensor) -> bool:
        """Whether `gather` supports x."""
        return 0 < x.nbytes <= 4 * WORDS and x.nbytes % 4 == 0

    def gather(self, x: Tensor, out: Tensor) -> None:
        """out [ranks, ..] = x of every rank.

        Args:
            x: [..] of any dtype, contiguous, see `takes_gathered`.
            out: contiguous.
        """
        words, pdl = x.nbytes // 4, gpu.supports_pdl(x.device)
        gather_words_kernel[(-(-words // BLOCK),)](
            x=x.reshape(-1).view(torch.int32),
            out=out.view(-1).view(torch.int32),
            inbox=self._inbox,
            addresses=self._addresses,
            epochs=self._epochs,
            words=words,
            capacity=WORDS,
            RANK=self.rank,
            RANKS=self.ranks,
            BLOCK=BLOCK,
            PDL=pdl,
            num_warps=2,
            **pdl_option(pdl),
        )

    def takes_rows(self, residual: Tensor) -> bool:
        """Whether `add_normed` supports a residual [T, H]."""
        size = residual.shape[1] * residual.element_size()
        few = 0 < len(residual) <= len(self._row_epochs)
        return few and size <= 4 * ROW_WORDS and size % 4 == 0 and residual.element_size() in (2, 4)

    def add_normed(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
        """residual += rmsnorm(sum of x over the ranks), in float32, rounded once.

        Args:
            x, residual: [T, H] float32, bfloat16 or float16, contiguous, see `takes_rows`.
            weight, eps: of the norm.
        """
        words, pdl = x.shape[1] * x.element_size() // 4, gpu.supports_pdl(x.device)
        block = gpu.next_power_of_2(words)
        add_normed_words_kernel[(len(x),)](
            x=x.view(-1).view(torch.int32),
            residual=residual,
            weight=weight,
            inbox=self._inbox,
            addresses=self._addresses,
            epochs=self._row_epochs,
            begin=2 * self.ranks * WORDS,
            row_words=words,
            capacity=WORDS,
            eps=eps,
            RANK=self.rank,
            RANKS=self.ranks,
            BLOCK=block,
            NUMBERS=4 // x.element_size(),
            STRIDE=ROW_WORDS,
            PDL=pdl,
            num_warps=max(1, min(16, block // 128)),
            **pdl_option(pdl),
        )

    def takes_parts(self, residual: Tensor) -> bool:
        """Whether `add_parts` supports a residual [T, H]."""
        return self._parts is not None and residual[0].nbytes <= PART_BYTES

    def add_parts(self, residual: Tensor, rows: Callable[[int, int], Tensor], norm: Norm) -> None:
        """residual [T, H] += sum of `rows` over both ranks, or rmsnorm of that sum, in chunks:
        while one is copied to the peer the next is computed.

        Args:
            residual: contiguous.
            rows: computes rows begin .. end - 1 of this rank's addend, contiguous.
            norm: of the sum; None: none.
        """
        assert self._parts is not None
        self._parts.add(residual, rows, norm)


class _Slot(NamedTuple):
    """Buffers and flags of one chunk in flight, in both directions.

    Attributes:
        arriving, leaving: [PART_BYTES] in this rank's memory and in the peer's.
        ready: [1] int32, chunks that the peer has written to `arriving`.
        freed: [1] int32, chunks that the peer has read from `leaving`.
        sent, taken: [1] int32, chunks that this rank has written and read.
        arrived: [1] int32, counter of `grid_barrier`.
        its_ready, its_freed: addresses of the peer's flags.
    """

    arriving: Tensor
    leaving: Tensor
    ready: Tensor
    freed: Tensor
    sent: Tensor
    taken: Tensor
    arrived: Tensor
    its_ready: int
    its_freed: int


class _Part(NamedTuple):
    """A chunk in flight.

    Attributes:
        slot: of its buffers.
        residual: rows that it is added to.
        own: this rank's addend.
        announced: event recorded after the flag that tells the peer.
    """

    slot: _Slot
    residual: Tensor
    own: Tensor
    announced: torch.cuda.Event


class _Parts:
    """All-reduce of large tensors of two ranks: each copies its addend to the peer and adds both.

    Args:
        rank: 0 or 1.
        own, far: memory after the inboxes, of this rank and of the peer.
        address: of `far`.
    """

    def __init__(self, rank: int, own: Tensor, far: Tensor, address: int) -> None:
        self._rank, self._slots = rank, []
        self._beside = torch.cuda.Stream(own.device)
        for number in range(PARTS):
            at, flags = number * PART_BYTES, PARTS * PART_BYTES + number * FLAGS_BYTES
            counts = own[flags : flags + FLAGS_BYTES].view(torch.int32)
            sent, taken, arrived = torch.zeros(3, 1, dtype=torch.int32, device=own.device)
            self._slots.append(
                _Slot(
                    own[at : at + PART_BYTES],
                    far[at : at + PART_BYTES],
                    counts[:1],
                    counts[FREED : FREED + 1],
                    sent,
                    taken,
                    arrived,
                    address + flags,
                    address + flags + 4 * FREED,
                )
            )

    def add(self, residual: Tensor, rows: Callable[[int, int], Tensor], norm: Norm) -> None:
        """See `PeerSums.add_parts`."""
        tokens, most = len(residual), PART_BYTES // residual[0].nbytes
        at_once = -(-tokens // -(-tokens // most))
        main = torch.cuda.current_stream(residual.device)
        on_way: _Part | None = None
        for number, begin in enumerate(range(0, tokens, at_once)):
            end = min(begin + at_once, tokens)
            slot = self._slots[number % PARTS]
            part = self._send(slot, residual[begin:end], rows(begin, end), main)
            if on_way is not None:
                self._receive(on_way, main, norm)
            on_way = part
        if on_way is not None:
            self._receive(on_way, main, norm)

    def _send(self, slot: _Slot, residual: Tensor, own: Tensor, main: torch.cuda.Stream) -> _Part:
        self._beside.wait_stream(main)
        with torch.cuda.stream(self._beside):
            await_free_kernel[(1,)](freed=slot.freed, sent=slot.sent, num_warps=1)
            _like(slot.leaving, own).copy_(own, non_blocking=True)
            announce_kernel[(1,)](sent=slot.sent, address=slot.its_ready, num_warps=1)
            announced = self._beside.record_event()
        return _Part(slot, residual, own, announced)

    def _receive(self, part: _Part, main: torch.cuda.Stream, norm: Norm) -> None:
        # The kernel below fills the device while it waits for the peer. announce_kernel, for which
        # the peer waits, must not be queued behind it.
        main.wait_event(part.announced)
        slot, own = part.slot, part.own
        its = _like(slot.arriving, own)
        first, second = (own, its) if self._rank == 0 else (its, own)
        weight, eps = norm or (own, 0.0)
        width = own.shape[1]
        block = gpu.next_power_of_2(width)
        add_received_kernel[(len(own),)](
            residual=part.residual,
            first=first,
            second=second,
            weight=weight,
            ready=slot.ready,
            taken=slot.taken,
            arrived=slot.arrived,
            freed=slot.its_freed,
            width=width,
            eps=eps,
            BLOCK=block,
            NORMED=norm is not None,
            num_warps=gpu.warps_for(block),
        )


def _like(memory: Tensor, like: Tensor) -> Tensor:
    """The first bytes of memory as a tensor of the shape and dtype of `like`."""
    return memory[: like.nbytes].view(like.dtype).view(like.shape)


def memory_bytes(ranks: int) -> int:
    """Bytes of peer memory of each rank."""
    return _inbox_bytes(ranks) + PARTS * (PART_BYTES + FLAGS_BYTES)


def _inbox_bytes(ranks: int) -> int:
    """Two inboxes from each rank, each for `sum` and `add_normed`."""
    return 2 * 2 * ranks * WORDS * 8


def _shared(
    store: Any, backend: Any, rank: int, ranks: int, device: torch.device
) -> tuple[Tensor, list[int], Tensor | None]:
    """Symmetric memory: this rank's, the addresses of all ranks', and the peer's of two ranks."""
    import torch._C._distributed_c10d as module

    c10d: Any = module
    # The rendezvous looks the group up by its name, which no other group of this process may have.
    name, size = f"cairn-{store._underlying_non_prefix_store.port}", memory_bytes(ranks)
    # The group keeps no reference to a store of Python's.
    numbered = _NumberedFromZero(store)
    group = c10d.ProcessGroup(numbered, rank, ranks)
    group._register_backend(device, c10d.ProcessGroup.BackendType.NCCL, backend)
    group._set_group_name(name)
    c10d._register_process_group(name, group)
    symmetric = c10d._SymmetricMemory
    memory = symmetric.empty_strided_p2p((size,), (1,), torch.uint8, device, name)
    handle = symmetric.rendezvous(memory, name)
    peer = None
    if ranks == 2:
        peer = handle.get_buffer(1 - rank, (size,), torch.uint8)
    _clear(memory, store, rank, ranks)
    return memory, [int(address) for address in handle.buffer_ptrs], peer


class _NumberedFromZero(Store):
    """A store for torch's rendezvous, whose keys PREFIX/NUMBER/RANK have the number of exchanges
    that the process has made so far. In a process with an earlier group it is higher than in the
    others, and each would wait for keys that nobody sets; here the first number is 0.

    Args:
        store: PrefixStore of the group.
    """

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store
        self._first: int | None = None

    def _key(self, key: str) -> str:
        prefix, number, rank = key.rsplit("/", 2)
        if self._first is None:
            self._first = int(number)
        return f"{prefix}/{int(number) - self._first}/{rank}"

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        value: bytes = self._store.get(self._key(key))
        return value

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self._store.wait([self._key(key) for key in keys], *timeout)


def _clear(memory: Tensor, store: Any, rank: int, ranks: int) -> None:
    """Clear this rank's memory; returns when all ranks have."""
    memory.zero_()
    torch.cuda.synchronize(memory.device)
    store.set(f"cleared/{rank}", "")
    store.wait([f"cleared/{other}" for other in range(ranks)])
