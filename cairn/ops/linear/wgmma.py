"""Products of some tokens with a large weight for Hopper: its rows are the lines of the products.

The time is that of reading the weight. One warp prefetches tiles of it with TMA, as many as shared
memory holds, and begins while the kernel in front still runs; four others multiply the tiles that
have arrived. wgmma needs 64 rows in its first operand: the weight has them, the few tokens do not.
Sums are float32.
"""

from __future__ import annotations

from cairn.ops import pdl
from cairn.ops.gpu import gl, gluon, hopper
from cairn.ops.linear import kernels
from cairn.ops.wgmma import arrive, copy, multiply

await_previous = gluon.also(pdl.await_previous)
launch_next = gluon.also(pdl.launch_next)
silu = gluon.also(kernels.silu)


@gluon.jit
def copy_parts(
    PDL: gl.constexpr,
    rows, columns, full, free, weight, tokens, first, second, begin, count,
):  # fmt: skip
    """Copy two blocks of rows of the weight, and all tokens, part by part from part `begin` on, to
    a ring of buffers."""
    STAGES: gl.constexpr = columns.shape[0]
    PART: gl.constexpr = rows.shape[2]
    BYTES: gl.constexpr = rows.dtype.primitive_bitwidth // 8
    ALL: gl.constexpr = (2 * rows.shape[1] + columns.shape[1]) * PART * BYTES
    ahead = gl.minimum(count, STAGES)
    for number in range(ahead):
        column = (begin + number) * PART
        arrived = full.index(number)
        hopper.mbarrier.expect(arrived, ALL)
        copy(weight, [first, column], arrived, rows.index(2 * number))
        copy(weight, [second, column], arrived, rows.index(2 * number + 1))
    await_previous(PDL)
    for number in range(ahead):
        copy(tokens, [0, (begin + number) * PART], full.index(number), columns.index(number))
    for number in range(ahead, count):
        column = (begin + number) * PART
        place = number % STAGES
        arrived = full.index(place)
        hopper.mbarrier.wait(free.index(place), (number // STAGES & 1) ^ 1)
        hopper.mbarrier.expect(arrived, ALL)
        copy(weight, [first, column], arrived, rows.index(2 * place))
        copy(weight, [second, column], arrived, rows.index(2 * place + 1))
        copy(tokens, [0, column], arrived, columns.index(place))


@gluon.jit
def sum_parts(
    GATED: gl.constexpr,
    rows, columns, full, free, out, out_stride, first, second, tokens, outputs, count,
):  # fmt: skip
    """Sum the products of all parts, and write them."""
    STAGES: gl.constexpr = columns.shape[0]
    ROWS: gl.constexpr = rows.shape[1]
    TOKENS: gl.constexpr = columns.shape[1]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    upper = gl.zeros([ROWS, TOKENS], gl.float32, layout=SUMS)
    lower = gl.zeros([ROWS, TOKENS], gl.float32, layout=SUMS)
    for number in range(count):
        place = number % STAGES
        hopper.mbarrier.wait(full.index(place), number // STAGES & 1)
        value = columns.index(place).permute((1, 0))
        upper = multiply(rows.index(2 * place), value, upper)
        lower = multiply(rows.index(2 * place + 1), value, lower)
        upper, lower = hopper.warpgroup_mma_wait(0, deps=[upper, lower])
        arrive(free.index(place))
    if GATED:
        store_outputs(out, silu(upper) * lower, first, tokens, outputs, out_stride)
    else:
        store_outputs(out, upper, first, tokens, outputs, out_stride)
        store_outputs(out, lower, second, tokens, outputs, out_stride)


@gluon.jit
def store_outputs(out, result, first, tokens, outputs, out_stride):
    """Write the tokens' outputs from output `first` on."""
    LAYOUT: gl.constexpr = result.type.layout
    number = first + gl.arange(0, result.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    token = gl.arange(0, result.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    at = out + token.to(gl.int64)[None, :] * out_stride + number[:, None]
    shown = (number < outputs)[:, None] & (token < tokens)[None, :]
    gl.store(at, result.to(out.dtype.element_ty), mask=shown)


@gluon.jit(early=("weight",), do_not_specialize=["tokens"])
def linear_groups_kernel(
    x, weight, out, tokens, outputs, out_stride, parts,
    ROWS: gl.constexpr, TOKENS: gl.constexpr, PART: gl.constexpr, STAGES: gl.constexpr,
    GATED: gl.constexpr, SPLIT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """out [tokens, outputs] = x W^T for all tokens and 2 ROWS rows of W.

    Args:
        x, weight: tensor descriptors with blocks [TOKENS, PART] and [ROWS, PART].
        parts: parts per row.
        TOKENS: tokens, padded to a power of two.
        STAGES: pipeline stages of parts.
        GATED: W is [2 outputs, ...]; out is silu of the first half's product, times the second's.
        SPLIT: out is [splits, tokens, outputs] (split-K).
        PDL: as in `await_previous`.
    """
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    SIGNAL: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    launch_next(PDL)
    dtype: gl.constexpr = weight.dtype
    rows = gl.allocate_shared_memory(dtype, [2 * STAGES, ROWS, PART], TILE)
    columns = gl.allocate_shared_memory(dtype, [STAGES, TOKENS, PART], TILE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], SIGNAL)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], SIGNAL)
    for signal in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(signal), 1)
        hopper.mbarrier.init(free.index(signal), 1)
    hopper.fence_async_shared()
    if GATED:
        first = gl.program_id(0) * ROWS
        second = first + outputs
    else:
        first = gl.program_id(0) * (2 * ROWS)
        second = first + ROWS
    split = gl.program_id(1)
    splits = gl.num_programs(1)
    begin = parts * split // splits
    count = parts * (split + 1) // splits - begin
    if SPLIT:
        out += split.to(gl.int64) * tokens * out_stride
    shared = (rows, columns, full, free)
    task = (out, out_stride, first, second, tokens, outputs, count)
    source = (weight, x, first, second, begin, count)
    # Gluon keeps constexprs only in an unnamed first operand of a tuple sum.
    gl.warp_specialize(
        [
            (sum_parts, (GATED,) + shared + task),  # noqa: RUF005 - Triton knows no starred items
            (copy_parts, (PDL,) + shared + source),  # noqa: RUF005
        ],
        [1],
        [24],
    )
