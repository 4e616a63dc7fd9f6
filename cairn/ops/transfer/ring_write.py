"""What the host is told of a step, where it looks once the step is over."""

from __future__ import annotations

from torch import Tensor

from cairn.ops import gpu
from cairn.ops.benching import Draw, Point, Points, moved
from cairn.ops.checks import INT64, expect, refuse
from cairn.ops.registry import op
from cairn.ops.testing import Cases, Make
from cairn.ops.transfer.kernels import ring_write_kernel
from cairn.ops.transfer.ring_read import check_ring


@op(mutates=("ring",))
def ring_write(values: Tensor, ring: Tensor, count: Tensor) -> None:
    """ring[(count - 1) % N, :n] = values: the answer to the entry that `ring_read` took last.

    Args:
        values: [n] int64, contiguous.
        ring: [N, W] int64, contiguous, N > 0 and W >= n, on the device of the values or pinned.
        count: [1] int64, entries taken so far, one or more.
    Raises:
        BadArgument: for another shape, dtype, device or layout.
    """
    ring[(int(count) - 1) % len(ring), : len(values)] = values.to(ring.device)


@ring_write.check
def _(values: Tensor, ring: Tensor, count: Tensor) -> None:
    expect("ring_write", "values", values, 1, INT64, dense=-1)
    expect("ring_write", "ring", ring, 2, INT64, dense=-1)
    check_ring("ring_write", ring, count, values)
    if len(values) > ring.shape[1]:
        refuse("ring_write", "values", f"has {len(values)} numbers for entries of {ring.shape[1]}")


@ring_write.implementation("triton", devices=gpu.DEVICES)
def _(values: Tensor, ring: Tensor, count: Tensor) -> None:
    numbers = len(values)
    block = gpu.next_power_of_2(max(1, numbers))
    ring_write_kernel[(1,)](
        *(values, ring, count, *ring.shape, numbers, block), num_warps=gpu.warps_for(block)
    )


@ring_write.cases
def _(make: Make) -> Cases:
    for count, (entries, width, numbers) in ((1, (1, 16, 16)), (7, (4, 48, 33)), (4, (4, 8, 0))):
        values = make.randint(-1, 1 << 40, numbers)
        ring = make.randint(0, 9, entries, width)
        yield make.args(values, ring, make.tensor([count], INT64[0]))


@ring_write.bench
def _(draw: Draw) -> Points:
    for rows in (1, 8, 64):
        values = draw.randint(0, 1 << 40, rows)
        given = draw.args(values, draw.randint(0, 1, 4, 2 * rows), draw.tensor([3], INT64[0]))
        yield Point(str(rows), given, 2 * moved(values))
