"""Output of a step into a ring buffer, which the host reads once the step is over."""

from __future__ import annotations

from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import INT64, expect, refuse
from cairn.ops.kvcacheio.kernels import ring_write_kernel
from cairn.ops.kvcacheio.ring_read import check_ring
from cairn.ops.registry import op


@op(mutates=("ring", "kept"))
def ring_write(
    values: Tensor,
    ring: Tensor,
    count: Tensor,
    kept: Tensor | None = None,
    place: Tensor | None = None,
) -> None:
    """ring[(count - 1) % N, :n] = values: the output for the entry that `ring_read` took last. Also
    kept[place] = values, which the next step reads.

    Args:
        values: [n] int64, contiguous.
        ring: [N, W] int64, contiguous, N > 0 and W >= n, on the device of the values or pinned.
        count: [1] int64, entries taken so far, one or more.
        kept: [K] int64, contiguous, or None.
        place: [n] int64 in [0, K), contiguous; with `kept`. The result of a repeated place is
            undefined.
    Raises:
        BadArgument: for another shape, dtype, device or layout.
    """
    ring[(int(count) - 1) % len(ring), : len(values)] = values.to(ring.device)
    if kept is not None and place is not None:
        kept.index_copy_(0, place, values)


@ring_write.check
def _(call: Call) -> None:
    expect("ring_write", "values", call.values, 1, INT64, dense=-1)
    expect("ring_write", "ring", call.ring, 2, INT64, dense=-1)
    check_ring("ring_write", call.ring, call.count, call.values)
    if len(call.values) > call.ring.shape[1]:
        refuse(
            "ring_write",
            "values",
            f"has {len(call.values)} numbers for entries of {call.ring.shape[1]}",
        )
    if (call.kept is None) != (call.place is None):
        missing = "kept" if call.kept is None else "place"
        refuse("ring_write", missing, "is None: `kept` and `place` are given together")
    if call.kept is not None and call.place is not None:
        expect("ring_write", "kept", call.kept, 1, INT64, call.values, dense=-1)
        expect("ring_write", "place", call.place, call.values.shape, INT64, call.values, dense=-1)


@ring_write.implementation("triton", devices=gpu.DEVICES, replayed=True)
def _(call: Call) -> None:
    numbers = len(call.values)
    block = gpu.next_power_of_2(max(1, numbers))
    ring_write_kernel[(1,)](
        values=call.values,
        ring=call.ring,
        count=call.count,
        kept=call.kept,
        place=call.place,
        entries=call.ring.shape[0],
        width=call.ring.shape[1],
        numbers=numbers,
        BLOCK=block,
        PDL=gpu.supports_pdl(call.values.device),
        num_warps=gpu.warps_for(block),
    )
