"""Causal attention over the whole paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import cpu, gpu
from cairn.ops.attention import launch, on_cpu, paging, prefill
from cairn.ops.attention import tiles as tiling
from cairn.ops.attention.merge_states import merged
from cairn.ops.attention.tuning import TUNING
from cairn.ops.call import Call
from cairn.ops.checks import check_caches, check_queries, check_slots, refuse
from cairn.ops.cpu import amx
from cairn.ops.registry import op


@op
def dense_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    row: Tensor,
    slot: Tensor,
    page_table: Tensor,
    scale: float | None = None,
    mask_landmarks: bool = False,
    segments: list[int] | None = None,
    chunked: bool = False,
) -> tuple[Tensor, Tensor]:
    """Causal attention of every token over slots 0 .. slot of its row.

    Args:
        q: [T, h_q, d].
        k_cache, v_cache: [pages, h_kv, S, d], or quantized; query head h reads KV head
            h // (h_q // h_kv).
        row, slot: [T] int64. Slots 0 .. slot of the row are written.
        page_table: [rows, max_pages] int32, logical to physical page.
        scale: softmax scale; None: d ** -0.5.
        mask_landmarks: the last slot of every page is masked.
        segments: runs of tokens known on the host: (row, first slot, number) of tokens in
            consecutive slots of a row, in order, covering all tokens. None: unknown.
        chunked: as in `window_attention`.
    Returns:
        (o [T, h_q, d] in q's dtype, lse [T, h_q] float32); a token without a visible key has o = 0
        and lse = -inf.
    Raises:
        BadArgument: for another shape, dtype, device or layout.
    """
    _, heads, size, dim = k_cache.shape
    o = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
    bytes_per_page = 4 * heads * size * dim
    pages = 1 + int(slot.max()) // size if slot.numel() else 0
    width = max(1, min(pages, TUNING.paging_block_bytes // bytes_per_page))
    for begin in range(0, pages, width):
        tokens = (slot >= begin * size).nonzero()[:, 0]
        page = tokens.new_tensor([begin])
        for at in tokens.split(paging.tokens_per_block(width * bytes_per_page, q.shape[0])):
            part = paging.attend_span(
                q[at],
                k_cache,
                v_cache,
                row[at],
                None,
                slot[at],
                page_table,
                page,
                width,
                scale,
                mask_landmarks,
            )
            o[at], lse[at] = merged(o[at], lse[at], *part)
    return o.to(q.dtype), lse


@dense_attention.check
def _(call: Call) -> None:
    name = "dense_attention"
    _, kv_heads, _, dim = check_caches(name, call.k_cache, call.v_cache, call.q)
    tokens, _ = check_queries(name, "q", call.q, kv_heads, dim)
    check_slots(name, tokens, call.row, call.slot, call.page_table, call.q)
    if call.segments is not None and (len(call.segments) % 3 or sum(call.segments[2::3]) != tokens):
        wanted = f"row, first slot and number of segments of {tokens} tokens"
        refuse(name, "segments", f"is {call.segments}, not {wanted}")


@dense_attention.fake
def _(call: Call) -> tuple[Tensor, Tensor]:
    return call.q.new_empty(call.q.shape), call.q.new_empty(call.q.shape[:2], dtype=torch.float32)


@dense_attention.implementation("numba", devices=cpu.DEVICES, when=on_cpu.is_few)
def _(call: Call) -> tuple[Tensor, Tensor]:
    return on_cpu.attend_few(call, on_cpu.EVERYTHING, False, call.q.dtype)


@dense_attention.implementation(
    "amx", devices=("cpu",), dtypes=(torch.bfloat16,), missing=amx.MISSING, when=on_cpu.has_amx
)
def _(call: Call) -> tuple[Tensor, Tensor]:
    return on_cpu.attend_amx(call, on_cpu.EVERYTHING, False, call.q.dtype)


@dense_attention.implementation(
    "tiled",
    devices=("cpu",),
    when=lambda call: tiling.worthwhile(call.q, call.k_cache, call.row),
)
def _(call: Call) -> tuple[Tensor, Tensor]:
    definition = dense_attention.using("reference")
    o, lse = on_cpu.attend_tiles(
        call, 1024, torch.float32, on_cpu.everything, lambda some: definition(**some.asdict())
    )
    return o.to(call.q.dtype), lse


dense_attention.tolerance(
    {torch.bfloat16: (1.6e-2, 1e-2)},
    "the flash kernel rounds probabilities and o of every block, amx probabilities, the definition "
    "o alone",
)


def _by_groups(call: Call) -> bool:
    fitting = prefill.fits(
        call.q, call.k_cache, call.v_cache, call.page_table, call.scale, call.segments
    )
    return fitting and not call.mask_landmarks


def _task(call: Call) -> launch.Task:
    return launch.Task(
        call.q,
        call.k_cache,
        call.v_cache,
        call.row,
        call.slot,
        call.page_table,
        scale=call.scale,
        mask_landmarks=call.mask_landmarks,
        segments=call.segments,
    )


def _by_splits(call: Call) -> bool:
    tiled = launch.dense_in_tiles(call.q, call.k_cache.shape[1], call.chunked, call.segments)
    return not tiled and launch.accepts(call.q, call.k_cache, call.v_cache)


@dense_attention.implementation(
    "triton_splits", devices=gpu.DEVICES, when=_by_splits, replayed=True
)
def _(call: Call) -> tuple[Tensor, Tensor]:
    return launch.attend_splits(_task(call), call.q.dtype)


@dense_attention.implementation(
    "gluon",
    devices=gpu.DEVICES,
    when=_by_groups,
    missing="" if gpu.gl else "needs Triton 3.6",
    replayed=True,
)
def _(call: Call) -> tuple[Tensor, Tensor]:
    return prefill.attend(
        call.q, call.k_cache, call.v_cache, call.page_table, call.scale, call.segments or ()
    )


@dense_attention.implementation(
    "triton_tiles",
    devices=gpu.DEVICES,
    when=lambda call: launch.accepts(call.q, call.k_cache, call.v_cache),
    replayed=True,
)
def _(call: Call) -> tuple[Tensor, Tensor]:
    return launch.attend_tiles(_task(call), call.q.dtype)
