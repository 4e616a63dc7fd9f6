"""Input of the next step from a ring buffer, for steps that are queued before it is known."""

from __future__ import annotations

from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import INT64, expect, refuse
from cairn.ops.kvcacheio.kernels import ring_read_kernel
from cairn.ops.registry import op

BLOCK = 4096
"""Words that a program loads at a time."""


@op(mutates=("target", "count"))
def ring_read(target: Tensor, ring: Tensor, count: Tensor) -> None:
    """target = ring[count % N], then count += 1: each call takes the next entry of a ring.

    The ring may be pinned memory of the host. A CUDA graph that begins with this op reads another
    entry each time it is replayed, with no copy beside it; the host may write an entry again once
    the call that took it is over.

    Args:
        target: [L, W] int64, with contiguous lines.
        ring: [N, L, W] int64, likewise, N > 0, on the target's device or pinned.
        count: [1] int64, entries taken so far.
    Raises:
        BadArgument: for another shape, dtype, device or layout.
    """
    target.copy_(ring[int(count) % len(ring)])
    count += 1


def check_ring(op: str, ring: Tensor, count: Tensor, like: Tensor) -> None:
    """Raise BadArgument unless ring and count have the documented layout, in memory that kernels on
    `like`'s device can access."""
    if len(ring) == 0:
        refuse(op, "ring", f"has shape {list(ring.shape)}, not one entry or more")
    if ring.device != like.device and not (ring.device.type == "cpu" and ring.is_pinned()):
        refuse(op, "ring", f"lies on {ring.device}, other arguments on {like.device}: pin it")
    expect(op, "count", count, (1,), INT64, like)


@ring_read.check
def _(call: Call) -> None:
    expect("ring_read", "target", call.target, 2, INT64, dense=1)
    expect("ring_read", "ring", call.ring, (None, *call.target.shape), INT64, dense=1)
    check_ring("ring_read", call.ring, call.count, call.target)


@ring_read.implementation("triton", devices=gpu.DEVICES, replayed=True)
def _(call: Call) -> None:
    words = call.target.numel()
    block = min(BLOCK, gpu.next_power_of_2(max(1, words)))
    ring_read_kernel[(1,)](
        target=call.target,
        ring=call.ring,
        count=call.count,
        entries=len(call.ring),
        words=words,
        width=call.target.shape[1],
        target_line=call.target.stride(0),
        ring_entry=call.ring.stride(0),
        ring_line=call.ring.stride(1),
        BLOCK=block,
        PDL=gpu.supports_pdl(call.target.device),
        num_warps=gpu.warps_for(block),
    )
