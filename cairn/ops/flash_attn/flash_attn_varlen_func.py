"""FlashAttention over ragged sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from cairn.ops.checks import refuse
from cairn.ops.flash_attn.call import Call, refuse_modifiers
from cairn.ops.flash_attn.flash_attention import flash_attention


@flash_attention.front(replayed=True)
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sequence[int | None] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    sinks: Tensor | None = None,
    score_mod: Callable[..., object] | None = None,
    aux_tensors: Sequence[Tensor] | None = None,
    ver: int = 3,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of ragged queries; scores, masks and results as in `flash_attn_with_kvcache`.

    Args:
        q: [T, H, d]; float32, bfloat16, float16, or 8-bit floating point, which gives bfloat16.
        k, v: [T', Hk, d] and [T', Hk, dv]; with page_table [pages, P, Hk, d] and [.., dv].
        cu_seqlens_q, cu_seqlens_k: [B + 1] int32, cumulative lengths; None: q is [B, Sq, H, d], k
            and v are [B, Sk, Hk, ..]. The second is not read with page_table.
        max_seqlen_q: upper bound of the queries of a sequence; None: unknown.
        max_seqlen_k: ignored.
        seqused_q, seqused_k: [B] int32, used length of each sequence. Rows of q beyond it give 0
            (and +inf in lse).
        page_table: [B, n] int32; lengths are then seqused_k.
        softmax_scale, causal, qv, q_descale, k_descale, v_descale, window_size, attention_chunk,
        softcap, return_softmax_lse, sinks, out: as in `flash_attn_with_kvcache`.
        num_splits, pack_gqa, sm_margin, ver: ignored.
        score_mod, aux_tensors: None.
    Returns:
        out like q with dv, or (out, lse [H, T] or [B, H, Sq] float32).
    Raises:
        BadArgument: for another shape, dtype, device or stride, (on a CPU) lengths or pages out of
            range, or a modifier.
    """
    name = "flash_attn_varlen_func"
    refuse_modifiers(name, score_mod, aux_tensors)
    paged = page_table is not None
    if paged and seqused_k is None:
        refuse(name, "seqused_k", "is None", "Paged keys need their lengths")
    call = Call(
        name,
        q,
        k,
        v,
        page_table,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=None if paged else cu_seqlens_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        qv=qv,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        sinks=sinks,
        window=window_size,
        chunk=attention_chunk,
    )
    if cu_seqlens_k is None and k.dim() == 3:
        refuse(name, "cu_seqlens_k", "is None", "Only whole or paged keys do without it")
    call.check()
    call.check_numbers()
    return call.run(softmax_scale, causal, softcap, max_seqlen_q, out, return_softmax_lse)
