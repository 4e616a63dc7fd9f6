"""Vertical-slash sparse attention, for batches of equal length and for ragged sequences
(cu_seqlens)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.checks import FLOATS, expect, refuse
from cairn.ops.sparse_flash_attn.vertical_slash_attention import BLOCK, vertical_slash_attention

WIDEST = 256
_INT32 = (torch.int32,)


@vertical_slash_attention.front(replayed=True)
def sparse_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_count: Tensor,
    block_offset: Tensor,
    column_count: Tensor,
    column_index: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of every row block of 64 queries to the blocks and columns of keys that
    `convert_vertical_slash_indexes` lists for it (with blocks of 64 and 64).

    score = q . k * softmax_scale, then softcap * tanh(score / softcap) if softcap > 0; softmax over
    the union of what is listed, in float32. Keys beyond the sequence are ignored.

    Args:
        q: [B, Sq, H, d], float32, bfloat16 or float16, d up to 256.
        k, v: [B, Sk, Hk, d], q's dtype; query head h reads head h // (H / Hk).
        block_count, column_count: [B, H, R] int32, R >= ceil(Sq / 64): how many entries count.
        block_offset: [B, H, R, NS] int32, first keys of blocks of 64, ascending.
        column_index: [B, H, R, NV] int32, single keys, ascending.
        dropout_p: 0.
        softmax_scale: None: d^-1/2.
        causal: query i sees no key behind i + Sk - Sq.
        softcap: 0: none.
        alibi_slopes: None.
        deterministic: ignored; results always are.
        return_attn_probs: no effect, as there is no dropout.
        return_softmax_lse: return the scores' log-sum-exp too.
        out: like q, written and returned.
    Returns:
        out [B, Sq, H, d], 0 where nothing is seen; or (out, lse [B, H, Sq] float32, natural
        logarithm, +inf there).
    Raises:
        BadArgument: shapes, dtypes, devices or strides that do not fit, or what is not supported.
    """
    name = "sparse_attn_func"
    _refuse_modifiers(name, dropout_p, alibi_slopes)
    call = Call(name, q, k, v, block_count, block_offset, column_count, column_index)
    call.check()
    return call.run(softmax_scale, causal, softcap, out, return_softmax_lse)


@vertical_slash_attention.front(replayed=True)
def sparse_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_count: Tensor,
    block_offset: Tensor,
    column_count: Tensor,
    column_index: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`sparse_attn_func` of ragged sequences.

    Args:
        q: [T, H, d]; k, v: [T', Hk, d].
        block_count, block_offset, column_count, column_index: as in `sparse_attn_func`, B sequences
            and R >= ceil(max_seqlen_q / 64) row blocks; keys are numbered from the sequence's
            first.
        cu_seqlens_q, cu_seqlens_k: [B + 1] int32, where sequences begin and end.
        max_seqlen_q: no sequence has more queries.
        max_seqlen_k: ignored.
        dropout_p, softmax_scale, causal, softcap, alibi_slopes, deterministic, return_attn_probs,
        return_softmax_lse, out: as in `sparse_attn_func`.
    Returns:
        out [T, H, d], or (out, lse [H, T] float32).
    Raises:
        BadArgument: shapes, dtypes, devices or strides that do not fit, or what is not supported.
    """
    name = "sparse_attn_varlen_func"
    _refuse_modifiers(name, dropout_p, alibi_slopes)
    expect(name, "cu_seqlens_q", cu_seqlens_q)
    expect(name, "cu_seqlens_k", cu_seqlens_k)
    lists = (block_count, block_offset, column_count, column_index)
    call = Call(name, q, k, v, *lists, cu_seqlens_q, cu_seqlens_k, max_seqlen_q)
    call.check()
    return call.run(softmax_scale, causal, softcap, out, return_softmax_lse)


class Call(NamedTuple):
    """The tensors of a call under their public names.

    Attributes:
        name: of the public function, for messages.
        longest: most queries of a sequence; None: q is even.
    """

    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    block_count: Tensor
    block_offset: Tensor
    column_count: Tensor
    column_index: Tensor
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    longest: int | None = None

    def check(self) -> None:
        """Raise BadArgument unless shapes, dtypes, devices and strides are consistent."""
        name, q, k = self.name, self.q, self.k
        lead: tuple[int | None, ...] = (None,)
        if self.cu_seqlens_q is None:
            expect(name, "q", q, (None, None, None, None), FLOATS, dense=1)
            lead = (q.shape[0], None)
        else:
            expect(name, "q", q, (None, None, None), FLOATS, dense=1)
        width = q.shape[-1]
        if not 1 <= width <= WIDEST:
            refuse(name, "q", f"has heads of {width} numbers, not 1 to {WIDEST}")
        expect(name, "k", k, (*lead, None, width), (q.dtype,), q, dense=1)
        expect(name, "v", self.v, k.shape, (q.dtype,), q, dense=1)
        if not k.shape[-2] or not q.shape[-2] or q.shape[-2] % k.shape[-2]:
            refuse(name, "q", f"has {q.shape[-2]} heads, not a multiple of {k.shape[-2]}")
        batch = q.shape[0]
        if self.cu_seqlens_q is not None and self.cu_seqlens_k is not None:
            expect(name, "cu_seqlens_q", self.cu_seqlens_q, (None,), _INT32, q, dense=-1)
            batch = self.cu_seqlens_q.numel() - 1
            expect(name, "cu_seqlens_k", self.cu_seqlens_k, (batch + 1,), _INT32, q, dense=-1)
        self._check_lists(batch)

    def _check_lists(self, batch: int) -> None:
        name, needed = self.name, -(-self._longest // BLOCK)
        shape = (batch, self.q.shape[-2], None)
        expect(name, "block_count", self.block_count, shape, _INT32, self.q, dense=-1)
        rows = self.block_count.shape[2]
        if rows < needed:
            refuse(name, "block_count", f"has {rows} row blocks, the queries fill {needed}")
        for what, tensor, wanted in (
            ("block_offset", self.block_offset, (*self.block_count.shape, None)),
            ("column_count", self.column_count, self.block_count.shape),
            ("column_index", self.column_index, (*self.block_count.shape, None)),
        ):
            expect(name, what, tensor, wanted, _INT32, self.q, dense=-1)

    @property
    def _longest(self) -> int:
        most = self.q.shape[-3]
        return most if self.longest is None else min(most, max(0, self.longest))

    def run(
        self,
        scale: float | None,
        causal: bool,
        softcap: float,
        out: Tensor | None,
        with_lse: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """out, or (out, lse); arguments as in the public functions. Call `check` before."""
        q = self.q
        if out is None:
            out = gpu.empty(q.shape, q.dtype, q.device)
        expect(self.name, "out", out, q.shape, (q.dtype,), q, dense=1)
        lse = gpu.empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), torch.float32, q.device)
        vertical_slash_attention(
            q,
            self.k,
            self.v,
            out,
            lse,
            self.block_count,
            self.block_offset,
            self.column_count,
            self.column_index,
            self.cu_seqlens_q,
            self.cu_seqlens_k,
            self._longest,
            q.shape[-1] ** -0.5 if scale is None else float(scale),
            bool(causal),
            float(softcap),
        )
        return (out, lse) if with_lse else out


def _refuse_modifiers(name: str, dropout_p: float, alibi_slopes: Tensor | None) -> None:
    """Raise BadArgument for options that no kernel supports."""
    if dropout_p != 0.0:
        refuse(name, "dropout_p", f"is {dropout_p}", "Only 0 is supported")
    if alibi_slopes is not None:
        refuse(name, "alibi_slopes", "is not supported", "Pass None")
