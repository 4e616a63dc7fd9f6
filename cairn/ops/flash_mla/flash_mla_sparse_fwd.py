"""Prefill latent attention over selected rows of keys, with FlashMLA's interface."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, INT32, expect, refuse
from cairn.ops.registry import op
from cairn.ops.sparse_mla import attend_launch
from cairn.ops.sparse_mla.sparse_mla import sparse_mla

NAME = "flash_mla_sparse_fwd"


@op
def flash_mla_sparse_fwd(
    q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, d_v: int = 512
) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax attention of every token over its own selection of rows of kv, shared by all heads. A
    row is the key; its first d_v elements are the value.

    Args:
        q: [Sq, H, D] bfloat16, float16 or float32.
        kv: [Sk, 1, D] of its dtype.
        indices: [Sq, 1, topk] int32; indices outside of 0 to Sk - 1 are ignored.
        sm_scale: of the dot products.
        d_v: elements of a value.
    Returns:
        (out [Sq, H, d_v] of q's dtype, max_logits, lse [Sq, H] float32, both in base 2, of logits
        times log2(e)); a token without a valid index has out = 0 and -inf in both.
    Raises:
        BadArgument: for another shape, dtype, device or layout.
    """
    tokens, heads, _ = q.shape
    chosen, most = indices[:, 0], indices.shape[2]
    length = torch.full((tokens,), most, dtype=torch.int32, device=q.device)
    o, lse = sparse_mla.reference(q, kv.transpose(0, 1), chosen, length, sm_scale, d_v)
    peaks = torch.full((tokens, heads), -torch.inf, dtype=torch.float32, device=q.device)
    if most and len(kv):
        hidden = (chosen < 0) | (chosen >= len(kv))
        keys = kv[chosen.clamp(0, len(kv) - 1).long(), 0].float()
        logits = torch.einsum("thd,tkd->thk", q.float(), keys) * (sm_scale * math.log2(math.e))
        peaks = logits.masked_fill(hidden.unsqueeze(1), -torch.inf).amax(dim=-1)
    return o.to(q.dtype), peaks, lse * math.log2(math.e)


@flash_mla_sparse_fwd.check
def _(call: Call) -> None:
    expect(NAME, "q", call.q, 3, FLOATS)
    tokens, heads, width = call.q.shape
    if not heads:
        refuse(NAME, "q", f"has shape {list(call.q.shape)}: no head")
    expect(NAME, "kv", call.kv, (None, 1, width), (call.q.dtype,), call.q, 1)
    expect(NAME, "indices", call.indices, (tokens, 1, None), INT32, call.q)
    if not 1 <= call.d_v <= width:
        refuse(NAME, "d_v", f"is {call.d_v}, not 1 to the {width} numbers of a head")


def _fits(call: Call) -> bool:
    cache = call.kv.transpose(0, 1)
    return call.indices.is_contiguous() and attend_launch.accepts(call.q, cache, call.d_v)


@flash_mla_sparse_fwd.implementation("triton", devices=gpu.DEVICES, when=_fits)
def _(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    (tokens, _, most), device = call.indices.shape, call.q.device
    length = torch.full((tokens,), most, dtype=torch.int32, device=device)
    candidates = attend_launch.Candidates(length, most, call.indices[:, 0])
    cache = call.kv.transpose(0, 1)
    o, lse, peaks = attend_launch.attend(
        call.q, cache, candidates, call.sm_scale, call.d_v, None, call.q.dtype, with_peaks=True
    )
    assert peaks is not None
    return o, peaks, lse * math.log2(math.e)


flash_mla_sparse_fwd.tolerance(sparse_mla.tolerances, sparse_mla.tolerance_reason)
