"""Tables of blocks and columns from vertical lines and diagonals."""

from __future__ import annotations

from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.registry import op
from cairn.ops.sparse_flash_attn import vertical_slash
from cairn.ops.sparse_flash_attn.kernels import convert_kernel
from cairn.ops.sparse_flash_attn.vertical_slash import Lines

LANES = 32
CHUNK = 64
Tables = tuple[Tensor, Tensor, Tensor, Tensor]


def _lines(call: Call) -> Lines:
    lists = (call.q_seqlens, call.kv_seqlens, call.vertical_indexes, call.slash_indexes, None, None)
    return Lines(*lists, call.context_size, call.block_size_M, call.block_size_N, call.causal)


def _merged(call: Call) -> Lines:
    counts = (call.vertical_indices_count, call.slash_indices_count)
    lists = (call.q_seqlens, call.kv_seqlens, call.vertical_indexes, call.slash_indexes, *counts)
    return Lines(*lists, call.context_size, call.block_size_M, call.block_size_N, call.causal)


@op
def convert_vertical_slash_indexes(
    q_seqlens: Tensor,
    kv_seqlens: Tensor,
    vertical_indexes: Tensor,
    slash_indexes: Tensor,
    context_size: int,
    block_size_M: int,
    block_size_N: int,
    causal: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Blocks and columns of keys that every row block of queries reads, see
    `cairn.ops.sparse_flash_attn.vertical_slash`.

    Args:
        q_seqlens, kv_seqlens: [B] int32.
        vertical_indexes: [B, H, NV] int32, ascending: keys that all queries see.
        slash_indexes: [B, H, NS] int32, descending: diagonals by their distance from the last
            query's own key. Causal callers give 0, or lose the verticals after the last range.
        context_size: queries of the longest sequence; R = ceil(context_size / M) row blocks.
        block_size_M: M, queries of a row block.
        block_size_N: N >= M, keys of a block.
        causal: the queries are the last of the keys.
    Returns:
        block_count [B, H, R], block_offset [B, H, R, NS] (first keys of blocks, ascending),
        column_count [B, H, R], column_index [B, H, R, NV], int32; zero where nothing is listed.
    Raises:
        BadArgument: for another shape, dtype, layout or device.
    """
    return vertical_slash.convert(
        Lines(
            q_seqlens,
            kv_seqlens,
            vertical_indexes,
            slash_indexes,
            None,
            None,
            context_size,
            block_size_M,
            block_size_N,
            causal,
        )
    )


@op
def convert_vertical_slash_indexes_mergehead(
    q_seqlens: Tensor,
    kv_seqlens: Tensor,
    vertical_indexes: Tensor,
    slash_indexes: Tensor,
    vertical_indices_count: Tensor,
    slash_indices_count: Tensor,
    context_size: int,
    block_size_M: int,
    block_size_N: int,
    causal: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`convert_vertical_slash_indexes` of the first entries of every head's lists.

    Args:
        q_seqlens, kv_seqlens, vertical_indexes, slash_indexes: as in
            `convert_vertical_slash_indexes`.
        vertical_indices_count, slash_indices_count: [H] int32, entries of a head that count.
        context_size, block_size_M, block_size_N, causal: as in `convert_vertical_slash_indexes`.
    Returns:
        As there.
    Raises:
        BadArgument: for another shape, dtype, layout or device.
    """
    return vertical_slash.convert(
        Lines(
            q_seqlens,
            kv_seqlens,
            vertical_indexes,
            slash_indexes,
            vertical_indices_count,
            slash_indices_count,
            context_size,
            block_size_M,
            block_size_N,
            causal,
        )
    )


def _launch(lines: Lines) -> Tables:
    found = lines.tables()
    batch, heads, rows = found[0].shape
    if batch * heads * rows:
        convert_kernel[(-(-rows // LANES), batch * heads)](
            q_seqlens=lines.q_seqlens,
            kv_seqlens=lines.kv_seqlens,
            verticals=lines.verticals,
            slashes=lines.slashes,
            vertical_counts=lines.vertical_counts,
            slash_counts=lines.slash_counts,
            block_count=found[0],
            block_offset=found[1],
            column_count=found[2],
            column_index=found[3],
            heads=heads,
            row_blocks=rows,
            nv=lines.verticals.shape[2],
            ns=lines.slashes.shape[2],
            m=lines.block_m,
            n=lines.block_n,
            CAUSAL=lines.causal,
            L=LANES,
            CHUNK=CHUNK,
            num_warps=1,
        )
    return found


@convert_vertical_slash_indexes.fake
def _(call: Call) -> Tables:
    return _lines(call).tables()


@convert_vertical_slash_indexes_mergehead.fake
def _(call: Call) -> Tables:
    return _merged(call).tables()


@convert_vertical_slash_indexes.check
def _(call: Call) -> None:
    vertical_slash.check("convert_vertical_slash_indexes", _lines(call))


@convert_vertical_slash_indexes_mergehead.check
def _(call: Call) -> None:
    name, lines = "convert_vertical_slash_indexes_mergehead", _merged(call)
    vertical_slash.check(name, lines, merged=True)


@convert_vertical_slash_indexes.implementation("triton", devices=gpu.DEVICES, replayed=True)
def _(call: Call) -> Tables:
    return _launch(_lines(call))


@convert_vertical_slash_indexes_mergehead.implementation(
    "triton", devices=gpu.DEVICES, replayed=True
)
def _(call: Call) -> Tables:
    return _launch(_merged(call))
