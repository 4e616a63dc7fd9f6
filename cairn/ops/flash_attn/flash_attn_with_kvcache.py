"""FlashAttention over a cache, after appending new keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cairn.ops.checks import refuse
from cairn.ops.flash_attn.append import Append
from cairn.ops.flash_attn.append_kv import append_kv
from cairn.ops.flash_attn.call import Call, refuse_modifiers
from cairn.ops.flash_attn.flash_attention import flash_attention

_NAME = "flash_attn_with_kvcache"
_NAMES = ("k_cache", "v_cache", "cache_seqlens", "cache_leftpad")


@append_kv.front
@flash_attention.front(replayed=True)
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    attention_chunk: int | None = None,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    sinks: Tensor | None = None,
    score_mod: Callable[..., object] | None = None,
    aux_tensors: Sequence[Tensor] | None = None,
    ver: int = 3,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over a cache of n = cache_seqlens[b] keys a sequence (FlashAttention-3, Shah et al.
    2024); new keys are first written to it in place, and attended to.

    score = (q . k + qv . v) * scale, then softcap * tanh(score / softcap), then the masks: query i
    of m has position a = i + n - m. `causal` keeps keys j <= a, window_size (l, r) keeps a - l <= j
    <= a + r (-1, None: no end), attention_chunk c keeps those of a's block of c keys. In float32.

    Args:
        q: [B, Sq, H, d], or [T, H, d] with cu_seqlens_q; d <= 576, last dims contiguous. float32,
            bfloat16, float16 or 8-bit floats, which give bfloat16 and are clamped after rotation.
        k_cache, v_cache: [B', Sk, Hk, d] and [B', Sk, Hk, dv], dv <= 576; with page_table [pages,
            P, Hk, ..], any P. Query head h reads head h // (H / Hk).
        k, v: [B, Sn, Hk, d] and [.., dv], or ragged [T', Hk, ..] with cu_seqlens_k_new: written at
            n .. n + Sn - 1; n grows by Sn. Both or neither. qv: like q with dv.
        rotary_cos, rotary_sin: [max, rd / 2], rd <= d. New key j is rotated by position base + j,
            query i by base + i if causal or windowed, else by base. The rotated key is stored.
        cache_seqlens: [B] int32, or one number for all; None: the whole cache.
        cache_batch_idx: [B] int32, row of the cache, or of page_table [B', n], of each sequence.
        cache_leftpad: [B] int32, number of invalid keys at the front; chunks begin after them.
        page_table: [B, n] int32; cu_seqlens_q, cu_seqlens_k_new: [B + 1] int32.
        max_seqlen_q: upper bound of the queries of a sequence; None: unknown.
        rotary_seqlens: [B] int32, base of the positions; None: cache_seqlens.
        q_descale, k_descale, v_descale: [B, Hk] float32, scales of q, k, v.
        softmax_scale: None: (d + dv of qv) ** -0.5.
        rotary_interleaved: elements 2j, 2j + 1 are pairs; otherwise j, j + rd / 2.
        scheduler_metadata, num_splits, pack_gqa, sm_margin, ver: ignored.
        sinks: [H]; e^sink is added to the denominator, but not to the returned lse.
        score_mod, aux_tensors: None. out: written and returned.
    Returns:
        out like q with dv; with return_softmax_lse (out, lse [B, H, Sq] or [H, T] float32, natural
        logarithm). A query that sees no key has out = 0, lse = +inf.
    Raises:
        BadArgument: for another shape, dtype, device or stride, bad lengths or pages, a modifier.
    """
    refuse_modifiers(_NAME, score_mod, aux_tensors)
    where = (page_table, cache_batch_idx, cache_leftpad, cu_seqlens_q)
    call = Call(_NAME, q, k_cache, v_cache, *where, qv=qv, sinks=sinks, names=_NAMES)
    call.q_descale, call.k_descale, call.v_descale = q_descale, k_descale, v_descale
    call.seqused_k = _lengths(call, cache_seqlens)
    call.window, call.chunk = window_size, attention_chunk
    new = Append(call, k, v, cu_seqlens_k_new, rotary_cos, rotary_sin, rotary_seqlens)
    new.run(rotary_interleaved, causal)
    return call.run(softmax_scale, causal, softcap, max_seqlen_q, out, return_softmax_lse)


def _lengths(call: Call, given: Tensor | int | None) -> Tensor | None:
    if given is None or isinstance(given, Tensor):
        return given
    if not hasattr(given, "__index__") or given < 0:
        refuse(call.name, "cache_seqlens", f"is {given!r}, neither a tensor nor 0 or more")
    return torch.full((call.batch,), given, dtype=torch.int32, device=call.q.device)
