"""Attention over a sliding window of the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import cpu, gpu
from cairn.ops.attention import launch, on_cpu, paging
from cairn.ops.attention import tiles as tiling
from cairn.ops.call import Call
from cairn.ops.checks import check_caches, check_dtype, check_min, check_queries, check_slots
from cairn.ops.cpu import amx
from cairn.ops.registry import op

_WIDEST = 1 << 14
"""Largest window, in slots, for tiles with a mask."""


@op
def window_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    row: Tensor,
    slot: Tensor,
    page_table: Tensor,
    window: int,
    scale: float | None = None,
    aligned: bool = False,
    mask_landmarks: bool = False,
    dtype: torch.dtype | None = None,
    chunked: bool = False,
) -> tuple[Tensor, Tensor]:
    """Causal attention of every token over its last slots.

    A token at slot s sees slots max(lo, 0) .. s, lo = s - window + 1, or with `aligned` that slot's
    page start, S * floor((s - window + 1) / S) (the window of a HiLS layer).

    Args:
        q: [T, h_q, d].
        k_cache, v_cache: [pages, h_kv, S, d], or quantized; query head h reads KV head
            h // (h_q // h_kv).
        row, slot: [T] int64. Slots 0 .. slot of the row are written.
        page_table: [rows, max_pages] int32, logical to physical page.
        window: slots, >= 1.
        scale: softmax scale; None: d ** -0.5.
        aligned: start the window at a page border.
        mask_landmarks: the last slot of every page is masked.
        dtype: dtype of o; None: float32.
        chunked: a hint that dozens of consecutive tokens share a row, as in a prefill; it does not
            change results.
    Returns:
        (o [T, h_q, d], lse [T, h_q] float32); a token without a visible key has o = 0, lse = -inf.
    Raises:
        BadArgument: for another shape, dtype, device, layout or window.
    """
    _, heads, size, dim = k_cache.shape
    first = slot - (window - 1)
    if aligned:
        first = first // size * size
    page = first.clamp(min=0) // size
    width = min((window + size - 2) // size + 1, page_table.shape[1])
    block = paging.tokens_per_block(4 * heads * dim * width * size, q.shape[0])
    parts = [
        paging.attend_span(
            query,
            k_cache,
            v_cache,
            row=in_row,
            first=low,
            slot=high,
            page_table=page_table,
            page=begin,
            width=width,
            scale=scale,
            mask_landmarks=mask_landmarks,
        )
        for query, in_row, low, high, begin in zip(
            *(x.split(block) for x in (q, row, first, slot, page)), strict=True
        )
    ]
    o, lse = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
    return o.to(dtype or torch.float32), lse


@window_attention.check
def _(call: Call) -> None:
    name = "window_attention"
    _, kv_heads, _, dim = check_caches(name, call.k_cache, call.v_cache, call.q)
    tokens, _ = check_queries(name, "q", call.q, kv_heads, dim)
    check_slots(name, tokens, call.row, call.slot, call.page_table, call.q)
    check_min(name, "window", call.window, 1)
    check_dtype(name, call.dtype)


@window_attention.fake
def _(call: Call) -> tuple[Tensor, Tensor]:
    o = call.q.new_empty(call.q.shape, dtype=call.dtype or torch.float32)
    return o, call.q.new_empty(call.q.shape[:2], dtype=torch.float32)


@window_attention.implementation("numba", devices=cpu.DEVICES, when=on_cpu.is_few)
def _(call: Call) -> tuple[Tensor, Tensor]:
    return on_cpu.attend_few(call, call.window, call.aligned, call.dtype or torch.float32)


def _by_amx(call: Call) -> bool:
    return on_cpu.has_amx(call) and call.dtype in (None, torch.float32, torch.bfloat16)


@window_attention.implementation(
    "amx", devices=("cpu",), dtypes=(torch.bfloat16,), missing=amx.MISSING, when=_by_amx
)
def _(call: Call) -> tuple[Tensor, Tensor]:
    return on_cpu.attend_amx(call, call.window, call.aligned, call.dtype or torch.float32)


def _by_tiles(call: Call) -> bool:
    # With a window of 1 a landmark may see nothing, which the flash kernel reports differently; the
    # mask of a tile grows with the window.
    return (
        tiling.worthwhile(call.q, call.k_cache, call.row)
        and (call.aligned or call.window > 1)
        and call.window <= _WIDEST
    )


@window_attention.implementation("tiled", devices=("cpu",), when=_by_tiles)
def _(call: Call) -> tuple[Tensor, Tensor]:
    definition = window_attention.using("reference")
    return on_cpu.attend_tiles(
        call,
        512,
        call.dtype or torch.float32,
        on_cpu.windows,
        lambda some: definition(**some.asdict()),
    )


def _in_splits(call: Call) -> bool:
    return not launch.in_tiles(call.q, call.k_cache.shape[1], call.chunked) and launch.accepts(
        call.q, call.k_cache, call.v_cache
    )


window_attention.tolerance(
    {torch.bfloat16: (1.6e-2, 1e-2)},
    "the flash kernel rounds probabilities and o, amx probabilities, to bfloat16; the definition "
    "stays in float32",
)


@window_attention.implementation(
    "triton_splits",
    devices=gpu.DEVICES,
    replayed=True,
    when=_in_splits,
)
def _(call: Call) -> tuple[Tensor, Tensor]:
    return launch.attend_splits(_task(call), call.dtype or torch.float32)


def _task(call: Call) -> launch.Task:
    given = (call.q, call.k_cache, call.v_cache, call.row, call.slot, call.page_table)
    return launch.Task(*given, call.window, call.scale, call.aligned, call.mask_landmarks)


@window_attention.implementation(
    "triton_tiles",
    devices=gpu.DEVICES,
    replayed=True,
    when=lambda call: launch.accepts(call.q, call.k_cache, call.v_cache),
)
def _(call: Call) -> tuple[Tensor, Tensor]:
    return launch.attend_tiles(_task(call), call.dtype or torch.float32)
