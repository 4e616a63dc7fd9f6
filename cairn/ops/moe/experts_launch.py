"""Launch of grouped products, and of fused experts, which are two of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.moe import align_launch, rows_launch
from cairn.ops.moe.kernels.align import tiles_kernel
from cairn.ops.moe.kernels.experts import GROUP, experts_kernel
from cairn.ops.moe.kernels.vector import vector_kernel
from cairn.ops.moe.tuning import TUNING, Tile
from cairn.ops.quantization import launch as quantization
from cairn.ops.quantization.blocks import EPS
from cairn.ops.quantization.codes import E4M3, E4M3_MAX

RULE = quantization.Rule(-E4M3_MAX, E4M3_MAX, "e4m3", EPS, inverse=True)
MAX_EXPERTS = align_launch.MAX_BUCKETS + 1
"""Most experts for rows that are already sorted by expert."""
_ALIGNED = 16
"""TMA needs addresses and row strides that are multiples of this many bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class Scaled:
    """A tensor, or e4m3 codes with their scales.

    Attributes:
        x: [R, K], or matrices [E, N, K].
        scale: [R, K / 128], or [E, blocks of rows, blocks of columns], float32, any strides; None:
            x is not quantised.
    """

    x: Tensor
    scale: Tensor | None = None

    @property
    def strides(self) -> tuple[int, int]:
        """Strides of the last two axes of the scales."""
        return (0, 0) if self.scale is None else (self.scale.stride(-2), self.scale.stride(-1))


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows grouped by expert in tiles; see `experts_kernel`.

    Attributes:
        count, tiles: upper bounds of the numbers of rows and tiles.
        owners: [tiles], the expert of each tile; None: there is one expert.
        order, used, begins, ends, sizes, pairs, share: arguments of `experts_kernel`.
        gathered, scattered, single: likewise.
    """

    count: int
    tiles: int
    owners: Tensor | None = None
    order: Tensor | None = None
    used: Tensor | None = None
    begins: Tensor | None = None
    ends: Tensor | None = None
    sizes: Tensor | None = None
    pairs: int = 0
    share: int = 1
    gathered: bool = False
    scattered: bool = False
    single: bool = False


def supports_fp8_experts(x: Tensor, block: tuple[int, int]) -> bool:
    """Whether tensor cores multiply 16-bit rows x with e4m3 experts quantized in blocks of this
    size."""
    fast = gpu.AVAILABLE and gpu.supports_e4m3(x.device) and x.dtype != torch.float32
    return fast and block == (GROUP, GROUP)


def multiply(
    a: Scaled,
    w: Scaled,
    out: Scaled,
    rows: Rows,
    tile: Tile,
    kind: str = "",
    limit: float = 0.0,
) -> None:
    """`experts_kernel`: rows of a with the matrices of their experts.

    Args:
        a: [any, K] with a row's elements side by side. Rows without scales are quantised by every
            program where w has scales.
        w: [E, N, K] contiguous, or [E, 2N, K] with a `kind`.
        out: [any, N].
        rows, tile: the expert of each row, and the tile sizes of a program.
        kind, limit: the activation ("" for none) and swiglu_limit (0 for none) of `fused_experts`.
    """
    _, lines, width = w.x.shape
    outputs = out.x.shape[1]
    columns = -(-outputs // tile.columns)
    if not rows.tiles:
        return
    table = tile.table and _is_table(w.x)
    matrices = _table(w.x, tile) if table else w.x
    pdl = gpu.supports_pdl(a.x.device)
    experts_kernel[(rows.tiles * columns,)](
        a=a.x,
        a_scale=a.scale,
        w=matrices,
        w_scale=w.scale,
        out=_bytes(out),
        out_scale=out.scale,
        order=rows.order,
        owners=rows.owners,
        used=rows.used,
        begins=rows.begins,
        ends=rows.ends,
        sizes=rows.sizes,
        size_stride=0 if rows.sizes is None else rows.sizes.stride(0),
        experts=len(w.x),
        pairs=rows.pairs,
        share=rows.share,
        outputs=outputs,
        width=width,
        rows=lines,
        a_stride=a.x.stride(0),
        a_scale_stride=a.strides[0],
        a_scale_step=a.strides[1],
        w_stride=w.x.stride(1),
        w_scale_expert=0 if w.scale is None else w.scale.stride(0),
        w_scale_row=w.strides[0],
        out_stride=out.x.stride(0),
        out_scale_stride=out.strides[0],
        out_scale_step=out.strides[1],
        count=rows.count,
        tiles=rows.tiles,
        columns=columns,
        limit=float(limit),
        BM=tile.rows,
        BN=tile.columns,
        BK=tile.part,
        TILES=tile.together,
        KIND=kind,
        CLAMPED=limit > 0,
        SCALED=w.scale is not None,
        GATHERED=rows.gathered,
        SCATTERED=rows.scattered,
        SINGLE=rows.single,
        TABLE=table,
        EVEN=width % tile.part == 0,
        PRECISION="ieee" if w.x.dtype == torch.float32 else "tf32",
        HARDWARE=gpu.supports_e4m3(a.x.device),
        STAGES=tile.stages if rows.sizes is not None else None,
        EP=gpu.next_power_of_2(len(w.x)),
        PDL=pdl,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _multiply_row(x: Tensor, w: Scaled, out: Tensor) -> None:
    """`vector_kernel`: x [1, K] with a matrix [1, N, K] into out [1, N]."""
    assert w.scale is not None
    _, outputs, width = w.x.shape
    blocks = width // GROUP
    padded = gpu.next_power_of_2(blocks)
    each = max(1, TUNING.vector_bytes // (padded * GROUP))
    vector_kernel[(-(-outputs // each),)](
        x=x,
        w=w.x,
        w_scale=w.scale,
        out=out,
        outputs=outputs,
        width=width,
        w_scale_row=w.strides[0],
        BN=each,
        BLOCKS=padded,
        HARDWARE=gpu.supports_e4m3(x.device),
        PDL=gpu.supports_pdl(x.device),
        num_warps=TUNING.vector_warps,
    )


def _bytes(out: Scaled) -> Tensor:
    return out.x if out.scale is None else out.x.view(torch.uint8)


def _is_table(w: Tensor) -> bool:
    size = w.element_size()
    return (
        gpu.supports_tma(w.device)
        and w.is_contiguous()
        and w.data_ptr() % _ALIGNED == 0
        and w.shape[2] * size % _ALIGNED == 0
        and w.shape[0] * w.shape[1] < 1 << 31
    )


def _table(w: Tensor, tile: Tile) -> object:
    shape = (w.shape[0] * w.shape[1], w.shape[2])
    return gpu.tensor_descriptor(w, shape, (w.shape[2], 1), (tile.columns, tile.part))


def tiles_for(w: Scaled, mean: float) -> tuple[Tile, Tile]:
    """Tiles of an expert's two products for a mean of `mean` rows per expert."""
    table = TUNING.tiles["8" if w.scale is not None else str(8 * w.x.element_size())]
    return next((pair[1:] for pair in table if mean <= pair[0]), table[-1][1:])


def spread(tile: Tile, tiles: int, outputs: int, device: torch.device) -> Tile:
    """The tile, with fewer columns if it has few rows and `tiles` tiles of rows with results [..,
    outputs] would leave multiprocessors without a program."""
    columns = tile.columns
    if tile.rows <= TUNING.min_rows:
        wanted = gpu.sm_count(device)
        while columns > TUNING.min_columns and tiles * -(-outputs // columns) < wanted:
            columns //= 2
    return tile._replace(columns=columns)


def quantized(x: Tensor) -> Scaled:
    """Rows [R, K] as codes with a scale for every 128 elements; K is a multiple of 128."""
    rows, width = x.shape
    codes = gpu.empty((rows, width), E4M3, x.device)
    # Scales are stored column-major: a tile reads those of adjacent rows together.
    scale = gpu.empty((width // GROUP, rows), torch.float32, x.device).t()
    quantization.quantize(x, codes, scale, GROUP, RULE)
    return Scaled(codes, scale)


def coded(x: Tensor, tile: Tile) -> Scaled:
    """Rows [R, K] for fp8 products: quantised, or unquantised for short rows in small tiles, which
    `experts_kernel` quantises itself because that is faster than another launch."""
    few = tile.rows <= TUNING.min_rows and x.shape[1] <= TUNING.quantized_inside
    return Scaled(x) if few else quantized(x)


def grouped(ids: Tensor, experts: int, tile: Tile) -> Rows:
    """The pairs of ids [T, k] grouped by expert in tiles of rows; a small number of pairs get one
    tile each."""
    pairs, share = ids.numel(), ids.shape[1]
    if pairs <= TUNING.single_pairs:
        return Rows(pairs, pairs, ids, pairs=pairs, share=share, single=True)
    tiles = min(pairs, (pairs + experts * (tile.rows - 1)) // tile.rows)
    device = ids.device
    order = gpu.empty((tiles * tile.rows,), torch.int32, device)
    begins = gpu.empty((experts + 1,), torch.int32, device)
    used = gpu.empty((1,), torch.int32, device)
    owners = gpu.empty((tiles,), torch.int32, device)
    into = align_launch.Sorted(order, begins, used, owners)
    align_launch.sort(ids, experts, into, block=tile.rows, filled=True)
    count = tiles * tile.rows
    return Rows(count, tiles, owners, order, used, pairs=pairs, share=share)


def multiply_all(a: Scaled, w: Scaled, out: Tensor) -> Tensor:
    """Multiply rows of a [M, K] with one e4m3 matrix [1, N, K] into out [M, N]. Rows without scales
    are quantised; K is a multiple of 128."""
    count = a.x.shape[0]
    tile = tiles_for(w, count)[1]
    if a.scale is None:
        if count == 1 and a.x.shape[1] <= TUNING.vector_width:
            _multiply_row(a.x, w, out)
            return out
        a = coded(a.x, tile)
    tiles = -(-count // tile.rows)
    tile = spread(tile, tiles, out.shape[1], out.device)
    multiply(a, w, Scaled(out), Rows(count, tiles), tile)
    return out


def multiply_sorted(a: Scaled, w: Scaled, out: Tensor, sizes: Tensor, offsets: Tensor) -> None:
    """Multiply rows of a [R, K], sorted by expert, with the matrices [E, N, K] into out [R, N].

    Args:
        sizes: [E, 3] int32; the first column is the number of rows of each expert.
        offsets: [E] int32, first row of each expert.
    """
    count, experts = a.x.shape[0], w.x.shape[0]
    if not count or not experts:
        return
    tile, device = tiles_for(w, count / experts)[1], a.x.device
    if count <= TUNING.single_pairs:
        rows = Rows(count, count, begins=offsets, sizes=sizes, single=True)
        multiply(a, w, Scaled(out), rows, spread(tile, count, out.shape[1], device))
        return
    tiles = min(count, (count + experts * (tile.rows - 1)) // tile.rows)
    owners, begins, ends = (gpu.empty((tiles,), torch.int32, device) for _ in range(3))
    used = gpu.empty((1,), torch.int32, device)
    tiles_kernel[(1,)](
        sizes=sizes,
        offsets=offsets,
        owners=owners,
        begins=begins,
        ends=ends,
        used=used,
        experts=experts,
        size_stride=sizes.stride(0),
        BM=tile.rows,
        EP=gpu.next_power_of_2(experts),
        PDL=gpu.supports_pdl(device),
        num_warps=4,
    )
    rows = Rows(count, tiles, owners, used=used, begins=begins, ends=ends)
    multiply(a, w, Scaled(out), rows, tile)


def run_experts(
    x: Tensor,
    w1: Scaled,
    w2: Scaled,
    weights: Tensor,
    ids: Tensor,
    kind: str = "silu",
    factor: float = 1.0,
    limit: float = 0.0,
) -> Tensor:
    """`fused_experts` of x [T, K], weights and ids [T, k]. With scales K and N are multiples of
    128."""
    tokens, width = x.shape
    experts, doubled, _ = w1.x.shape
    pairs, inner = ids.numel(), doubled // 2
    first, second = tiles_for(w1, pairs / experts)
    rows = grouped(ids, experts, first)
    first = spread(first, rows.tiles, inner, x.device)
    second = spread(second, rows.tiles, width, x.device)
    scaled = w1.scale is not None
    a = coded(x, first) if scaled else Scaled(x)
    with_scales = scaled and first.columns == GROUP
    dtype = E4M3 if with_scales else x.dtype
    between = Scaled(gpu.empty((rows.count, inner), dtype, x.device))
    if with_scales:
        scale = gpu.empty((inner // GROUP, rows.count), torch.float32, x.device).t()
        between = replace(between, scale=scale)
    multiply(a, w1, between, replace(rows, gathered=True), first, kind, limit)
    if scaled and not with_scales:
        between = coded(between.x, second)
    y = gpu.empty((pairs, width), x.dtype, x.device)
    multiply(between, w2, Scaled(y), replace(rows, scattered=True), second)
    out = gpu.empty((tokens, width), x.dtype, x.device)
    return rows_launch.sum_rows(y, out, ids.shape[1], factor, weights=weights, ids=ids)
