"""Attention of whole sequences, for training: window, selected pages, or all that came before."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOAT32, FLOATS, check_min, expect, refuse
from cairn.ops.landmark.select_pages import select_pages
from cairn.ops.registry import op
from cairn.train.sequence import launch


@op
def sequence_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lmk_q: Tensor | None,
    summary_key: Tensor | None,
    summary_bias: Tensor | None,
    page_size: int,
    window: int,
    topk: int = 0,
    softmax1: bool = False,
    aligned: bool = True,
    mask_landmarks: bool = True,
) -> tuple[Tensor, Tensor]:
    """Causal attention over sequences whose slot s lies in page s // S; differentiable.

    A query at slot s sees the slots s - window + 1 .. s, the first of them aligned down to a page
    start if `aligned`. With topk > 0 it also reads the pages that select_pages chooses (strategy
    hils): page j weighs exp(u_j), u_j = d ** -0.5 * lmk_q . summary_key_j + summary_bias_j, shared
    out among its slots but the last by the softmax of their logits. One softmax goes over the
    window's logits, the u of the selected pages and, with softmax1, a zero whose share is lost
    (HiLS-Attention). The choice of pages has no gradient.

    Args:
        q: [B, L, h_q, d], L a multiple of S.
        k, v: [B, L, h_kv, d].
        lmk_q: [B, L, h_q, d], None iff topk is 0, as are the next two.
        summary_key: [B, L / S, h_q, d].
        summary_bias: [B, L / S, h_q] float32.
        page_size: S, >= 2.
        window: slots, >= 1; L or more: all that came before.
        topk: pages that a KV head selects.
        softmax1: see above.
        aligned: the window starts at a page; needed for topk > 0.
        mask_landmarks: the last slot of a page is no key; needed for topk > 0.
    Returns:
        o [B, L, h_q, d] in q's dtype; page_mass [B, L, h_q] float32, the share of the softmax that
        the selected pages have.
    Raises:
        BadArgument: for another shape, dtype or device, or options that contradict each other.
    """
    length, heads, dim = q.shape[1:]
    groups = k.shape[2]
    slot = torch.arange(length, device=q.device)
    kind = torch.promote_types(q.dtype, torch.float32)
    keys, values = (x.to(kind).repeat_interleave(heads // groups, 2) for x in (k, v))
    logits = torch.einsum("bshd,bthd->bhst", q.to(kind), keys) * dim**-0.5
    first = slot - (window - 1)
    if aligned:
        first = first // page_size * page_size
    is_key = torch.ones_like(slot, dtype=torch.bool)
    if mask_landmarks:
        is_key = slot % page_size != page_size - 1
    visible = (slot <= slot[:, None]) & (slot >= first[:, None]) & is_key
    parts = [logits.masked_fill(~visible, -torch.inf)]
    if topk:
        assert lmk_q is not None and summary_key is not None and summary_bias is not None
        lse = parts[0].detach().logsumexp(-1).transpose(1, 2)
        summary, rule = (lmk_q, summary_key, summary_bias), (page_size, window, topk)
        parts.append(_page_logits(logits, summary, lse, groups, rule))
    if softmax1:
        parts.append(torch.zeros_like(logits[..., :1]))
    share = torch.cat(parts, -1).softmax(-1)
    weights = share[..., :length]
    page_mass = torch.zeros_like(q[..., 0], dtype=kind)
    if topk:
        from_pages = share[..., length : 2 * length]
        weights = weights + from_pages
        page_mass = from_pages.sum(-1).transpose(1, 2)
    o = torch.einsum("bhst,bthd->bshd", weights, values)
    return o.to(q.dtype).contiguous(), page_mass.contiguous()


@sequence_attention.check
def _(call: Call) -> None:
    name, as_selected = "sequence_attention", call.aligned and call.mask_landmarks
    check_min(name, "page_size", call.page_size, 2)
    # With a window of 1, a masked landmark would attend to nothing.
    check_min(name, "window", call.window, 1 if as_selected else 2)
    check_min(name, "topk", call.topk, 0)
    if call.topk and not as_selected:
        refuse(name, "topk", f"is {call.topk}", "It needs an aligned window and masked landmarks")
    _check_heads(call.q, call.k, call.v)
    batch, length, heads, dim = call.q.shape
    if length % call.page_size:
        refuse(name, "page_size", f"is {call.page_size}, which {length} slots are no multiple of")
    pages = length // call.page_size
    for part, value, shape in (
        ("lmk_q", call.lmk_q, call.q.shape),
        ("summary_key", call.summary_key, (batch, pages, heads, dim)),
        ("summary_bias", call.summary_bias, (batch, pages, heads)),
    ):
        if value is not None and call.topk:
            dtypes = FLOAT32 if part == "summary_bias" else (call.q.dtype,)
            expect(name, part, value, shape, dtypes, call.q)
        elif value is not None or call.topk:
            there = "None" if value is None else "given"
            refuse(name, part, f"is {there} and contradicts topk, which is {call.topk}")


def _check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    name = "sequence_attention"
    expect(name, "q", q, 4, FLOATS)
    expect(name, "k", k, (*q.shape[:2], None, q.shape[3]), (q.dtype,), q)
    expect(name, "v", v, k.shape, (q.dtype,), q)
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        refuse(name, "q", f"has {q.shape[2]} heads, not a multiple of the {k.shape[2]} of k")


def _page_logits(
    logits: Tensor,
    summary: tuple[Tensor, Tensor, Tensor],
    lse: Tensor,
    groups: int,
    rule: tuple[int, int, int],
) -> Tensor:
    """Logits of the keys in selected pages, -inf for all others: [B, h_q, L, L].

    Args:
        logits: of all keys [B, h_q, L, L].
        summary: lmk_q, summary_key, summary_bias.
        lse: of the window [B, L, h_q].
        groups: h_kv.
        rule: page size, window, topk.
    """
    z, key, bias = summary
    (batch, heads, length, _), pages, size = logits.shape, key.shape[1], rule[0]
    with torch.no_grad():
        chosen, _ = launch.select(select_pages.reference, z, key, bias, lse, groups, rule)
    place = torch.where(chosen < 0, pages, chosen).long()
    taken = torch.zeros(batch, length, groups, pages + 1, dtype=torch.bool, device=z.device)
    taken = taken.scatter_(3, place, True)[..., :pages].repeat_interleave(heads // groups, 2)
    u = torch.einsum("bshd,bphd->bhsp", z.to(logits.dtype), key.to(logits.dtype))
    u = u * z.shape[3] ** -0.5 + bias.transpose(1, 2).unsqueeze(2)
    u = u.masked_fill(~taken.transpose(1, 2), -torch.inf)
    last = torch.arange(length, device=z.device) % size == size - 1
    inside = logits.masked_fill(last, -torch.inf).unflatten(-1, (pages, size))
    result: Tensor = (u.unsqueeze(-1) + inside.log_softmax(-1)).flatten(-2)
    return result


@sequence_attention.fake
def _(call: Call) -> tuple[Tensor, Tensor]:
    return torch.empty_like(call.q), call.q.new_empty(call.q.shape[:3], dtype=torch.float32)


@sequence_attention.implementation(
    "triton",
    devices=gpu.DEVICES,
    when=lambda call: launch.accepts(call.q, call.page_size),
)
def _(call: Call) -> tuple[Tensor, Tensor]:
    # Clamp the window to the sequence length: the kernels add to its width, which must not
    # overflow.
    width = min(call.window, call.q.shape[1])
    rule = launch.Rule(
        call.page_size, width, call.topk, call.softmax1, call.aligned, call.mask_landmarks
    )
    return launch.attend(
        call.q, call.k, call.v, call.lmk_q, call.summary_key, call.summary_bias, rule
    )


sequence_attention.tolerance(
    {torch.bfloat16: (1.6e-2, 2e-2)},
    "probabilities are rounded to bfloat16 where they meet the values",
)
