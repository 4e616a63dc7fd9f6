"""Decode attention over a cache of latents (multi-head latent attention, DeepSeek-V2, 2.1)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.attention import launch
from cairn.ops.attention.latent_kernels import latent_split_kernel
from cairn.ops.attention.latent_wgmma import latent_groups_kernel
from cairn.ops.attention.tma import NO_LINES, are_lines, lines_of
from cairn.ops.attention.tuning import TUNING
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, INDICES, check_pages, expect, expect_within, refuse
from cairn.ops.registry import op

MAX_HEADS = 128
LATENT, ROPE = 512, 64
"""Widths of DeepSeek's cache, for benchmarks; the op takes any."""


@op
def cutlass_mla_decode(
    q_nope: Tensor,
    q_pe: Tensor,
    kv_c_and_k_pe_cache: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    workspace: Tensor | None,
    sm_scale: float,
    num_kv_splits: int = 1,
) -> Tensor:
    """Latent attention of one query token per sequence; all heads share the keys, whose first
    `latent` columns are the values.

    out = softmax([q_nope | q_pe] . row * sm_scale) row[:latent] over the first seq_lens[b] rows of
    a sequence, in float32. A sequence of length 0 gives zeros.

    Args:
        q_nope: [B, H, latent] float32, bfloat16 or float16, H <= 128; last dim contiguous.
        q_pe: [B, H, rope], of the same dtype.
        kv_c_and_k_pe_cache: [pages, P, latent + rope], of the same dtype; any P.
        seq_lens: [B] int32 or int64.
        page_table: [B, n] int32, n * P >= every length.
        workspace: ignored.
        sm_scale: softmax scale.
        num_kv_splits: ignored; the number of splits depends on the shapes.
    Returns:
        [B, H, latent], q_nope's dtype.
    Raises:
        BadArgument: for another shape, dtype, device or stride, or (on a CPU) lengths or pages out
            of range.
    """
    out = torch.zeros(q_nope.shape, dtype=q_nope.dtype, device=q_nope.device)
    size, latent = kv_c_and_k_pe_cache.shape[1], q_nope.shape[2]
    for row, length in enumerate(seq_lens.tolist()):
        if length:
            pages = page_table[row, : -(-length // size)].long()
            keys = kv_c_and_k_pe_cache[pages].flatten(0, 1)[:length].float()
            query = torch.cat((q_nope[row], q_pe[row]), dim=-1).float()
            weights = torch.softmax(query @ keys.T * sm_scale, dim=-1)
            out[row] = weights @ keys[:, :latent]
    return out


@cutlass_mla_decode.fake
def _(call: Call) -> Tensor:
    return torch.empty(call.q_nope.shape, dtype=call.q_nope.dtype, device=call.q_nope.device)


@cutlass_mla_decode.check
def _(call: Call) -> None:
    name, cache = "cutlass_mla_decode", call.kv_c_and_k_pe_cache
    expect(name, "q_nope", call.q_nope, (None, None, None), FLOATS, dense=1)
    batch, heads, latent = call.q_nope.shape
    if heads > MAX_HEADS:
        refuse(name, "q_nope", f"has {heads} heads, not at most {MAX_HEADS}")
    same = (call.q_nope.dtype,)
    expect(name, "q_pe", call.q_pe, (batch, heads, None), same, call.q_nope, dense=1)
    width = latent + call.q_pe.shape[2]
    expect(name, "kv_c_and_k_pe_cache", cache, (None, None, width), same, call.q_nope, dense=1)
    if not cache.shape[1]:
        refuse(name, "kv_c_and_k_pe_cache", f"has shape {list(cache.shape)}: pages of no slots")
    expect(name, "seq_lens", call.seq_lens, (batch,), INDICES, call.q_nope, dense=-1)
    expect(name, "page_table", call.page_table, (batch, None), (torch.int32,), call.q_nope, dense=1)
    expect_within(name, "seq_lens", call.seq_lens, cache.shape[1] * call.page_table.shape[1] + 1)
    check_pages(name, call.page_table, call.seq_lens, cache.shape[1], len(cache))


def _fits_groups(call: Call) -> bool:
    latent = call.q_nope.shape[2]
    return (
        gpu.supports_wgmma(call.q_nope.device)
        and (latent, call.q_pe.shape[2]) == (LATENT, ROPE)
        and call.kv_c_and_k_pe_cache.shape[1] % _BLOCK == 0
        and all(are_lines(part, _BLOCK) for part in _parts(call.kv_c_and_k_pe_cache, latent))
    )


def _parts(cache: Tensor, latent: int) -> tuple[Tensor, Tensor]:
    """The cache's values and its other columns: [pages, P, 1, .]."""
    return cache[..., :latent].unsqueeze(2), cache[..., latent:].unsqueeze(2)


@cutlass_mla_decode.implementation(
    "gluon",
    devices=gpu.DEVICES,
    dtypes=(torch.bfloat16, torch.float16),
    when=_fits_groups,
    missing="" if gpu.gl else "needs Triton 3.6",
    replayed=True,
)
def _(call: Call) -> Tensor:
    cache, (batch, heads, latent) = call.kv_c_and_k_pe_cache, call.q_nope.shape
    out = gpu.empty(call.q_nope.shape, call.q_nope.dtype, call.q_nope.device)
    if out.numel() == 0:
        return out
    values, rest = lines_of(*_parts(cache, latent), _BLOCK, math.inf)
    columns = -(-heads // _BLOCK)
    blocks = -(-call.page_table.shape[1] * cache.shape[1] // _BLOCK)
    most = max(1, min(blocks // _MIN_BLOCKS, TUNING.max_splits))
    splits = launch.whole_waves(columns * batch, gpu.sm_count(cache.device), most)
    part_o, part_lse = _parts_of(out, splits)
    latent_groups_kernel[(columns, splits, batch)](
        q_nope=call.q_nope,
        q_pe=call.q_pe,
        cache=cache,
        values=gpu.gluon_descriptor(values.blocks, (_BLOCK, latent // 2)),
        keys=gpu.gluon_descriptor(rest.blocks, (_BLOCK, ROPE)),
        seq_lens=call.seq_lens,
        page_table=call.page_table,
        o=part_o,
        lse=part_lse,
        scale=call.sm_scale,
        nope_row=call.q_nope.stride(0),
        nope_head=call.q_nope.stride(1),
        pe_row=call.q_pe.stride(0),
        pe_head=call.q_pe.stride(1),
        slot_stride=cache.stride(1),
        page_lines=values.page,
        table_stride=call.page_table.stride(0),
        HEADS=heads,
        SIZE=cache.shape[1],
        LINES=_BLOCK,
        num_warps=4,
    )
    if splits > 1:
        launch.merge(part_o, part_lse, out, None, pdl=gpu.supports_pdl(out.device))
    return out


def _parts_of(out: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    """Memory for the partial states of `splits` splits: o [B, H, splits, latent] (`out` itself for
    one split) and lse [B, H, splits] float32."""
    batch, heads, latent = out.shape
    part_lse = gpu.empty((batch, heads, splits), torch.float32, out.device)
    if splits == 1:
        return out, part_lse
    return gpu.empty((batch, heads, splits, latent), torch.float32, out.device), part_lse


@cutlass_mla_decode.implementation("triton", devices=gpu.DEVICES, replayed=True)
def _(call: Call) -> Tensor:
    cache = call.kv_c_and_k_pe_cache
    batch, heads, latent = call.q_nope.shape
    out = gpu.empty(call.q_nope.shape, call.q_nope.dtype, call.q_nope.device)
    if out.numel() == 0:
        return out
    single = call.q_nope.dtype == torch.float32
    lines = 16 if single else min(64, max(16, gpu.next_power_of_2(heads)))
    keys = 16 if single else 32
    large = lines == 64 and gpu.max_shared_memory(cache.device) >= _WIDE_BYTES
    values = rest = NO_LINES
    wide, size = 64 if large else keys, cache.shape[1]
    if size % wide == 0 and (not single or gpu.INTERPRETED):
        flops = 2 * batch * heads * call.page_table.shape[1] * size * (latent + cache.shape[2])
        values, rest = lines_of(*_parts(cache, latent), wide, flops)
    if values.blocks is not None:
        keys = wide
    columns = -(-heads // lines)
    blocks = -(-call.page_table.shape[1] * cache.shape[1] // keys)
    wanted = -(-_PROGRAMS // (columns * batch))
    splits = max(1, min(blocks // _MIN_BLOCKS, wanted, TUNING.max_splits))
    part_o, part_lse = _parts_of(out, splits)
    padded = [max(16, gpu.next_power_of_2(width)) for width in (latent, call.q_pe.shape[2])]
    latent_split_kernel[(splits, columns, batch)](
        q_nope=call.q_nope,
        q_pe=call.q_pe,
        cache=cache,
        values=values.blocks,
        keys=rest.blocks,
        seq_lens=call.seq_lens,
        page_table=call.page_table,
        o=part_o,
        lse=part_lse,
        scale=call.sm_scale,
        nope_row=call.q_nope.stride(0),
        nope_head=call.q_nope.stride(1),
        pe_row=call.q_pe.stride(0),
        pe_head=call.q_pe.stride(1),
        page_stride=cache.stride(0),
        slot_stride=cache.stride(1),
        page_lines=values.page,
        table_stride=call.page_table.stride(0),
        HEADS=heads,
        SIZE=cache.shape[1],
        LATENT=latent,
        ROPE=call.q_pe.shape[2],
        LP=padded[0],
        RP=padded[1],
        LINES=lines,
        KEYS=keys,
        PRECISION="ieee" if single else "tf32",
        num_warps=8 if lines == 64 else 4,
        num_stages=2,
    )
    if splits > 1:
        launch.merge(part_o, part_lse, out, None, pdl=gpu.supports_pdl(out.device))
    return out


_BLOCK = 64
"""Slots per block, and heads per program, of the warp-group kernel."""
_WIDE_BYTES = 222 << 10
"""Shared memory of a program of 64 heads with two blocks of 64 slots in flight."""
_PROGRAMS = 264
"""Programs that fill a large device twice: each holds most of a multiprocessor's memory."""
_MIN_BLOCKS = 4
"""Fewest blocks of keys per split."""


cutlass_mla_decode.tolerance(
    {torch.float32: (1e-4, 1e-5), torch.bfloat16: (1.6e-2, 1e-2)},
    "a sum over 576 products in another order, of which a softmax is taken",
)
