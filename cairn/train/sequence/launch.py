"""Launches of sequence_attention, forward and backward.

Which page is read by which queries differs from query to query. Queries are taken in blocks; every
block has a list of the pages that one of its queries selected, and every page a list of the blocks
that read it. The lists have room for all, so that nothing depends on what was selected but the
kernels' loops: a captured graph replays with other selections.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.landmark.select_pages import select_pages
from cairn.train.sequence import kernels

ROWS = 64
"""Queries times heads of a tile."""
MIN_HEADS = 16
"""Least size of a tl.dot operand; summaries of a page are padded to it."""
MAX_TOKENS = 1 << 15
"""Most tokens per call of select_pages, whose kernels have them on a grid axis of limited size."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Options of the op.

    Attributes:
        page_size, window, topk, softmax1, aligned, mask_landmarks: as in the op.
    """

    page_size: int
    window: int
    topk: int
    softmax1: bool
    aligned: bool
    mask_landmarks: bool


def accepts(q: Tensor, page_size: int) -> bool:
    """Whether the kernels support the shapes: powers of two, and heads that fit in a tile."""
    dim = q.shape[3]
    powers = all(n & (n - 1) == 0 for n in (dim, page_size))
    return powers and 16 <= dim <= 128 and 16 <= page_size <= 128 and q.shape[2] <= ROWS


def select(
    choose: Callable[..., tuple[Tensor, Tensor]],
    lmk_q: Tensor,
    summary_key: Tensor,
    summary_bias: Tensor,
    lse: Tensor,
    groups: int,
    rule: tuple[int, int, int],
) -> tuple[Tensor, Tensor]:
    """select_pages for sequences.

    Args:
        choose: the op, or its definition.
        lmk_q, summary_key, summary_bias: as in sequence_attention.
        lse: [B, L, h_q] float32, of the window.
        groups: h_kv.
        rule: page size, window, topk.
    Returns:
        pages [B, L, h_kv, topk] int32, -1 where there is none; u [B, L, h_q, topk], there -inf.
    """
    batch, length, heads, _ = lmk_q.shape
    pages = summary_key.shape[1]
    device = lmk_q.device
    table = torch.arange(batch * pages, dtype=torch.int32, device=device).view(batch, pages)
    slot = torch.arange(length, device=device).repeat(batch)
    row = torch.arange(batch, device=device).repeat_interleave(length)
    tokens = [x.reshape(batch * length, *x.shape[2:]) for x in (lmk_q, lse)] + [row, slot]
    key, bias = summary_key.flatten(0, 1), summary_bias.flatten(0, 1)
    found = []
    for begin in range(0, batch * length, MAX_TOKENS):
        z, own_lse, own_row, own_slot = (x[begin : begin + MAX_TOKENS] for x in tokens)
        found.append(
            choose(z, key, bias, own_lse, own_row, own_slot, table, *rule, num_kv_heads=groups)
        )
    chosen, u = (torch.cat(parts) for parts in zip(*found, strict=True))
    return chosen.view(batch, length, groups, -1), u.view(batch, length, heads, -1)


def listed(flags: Tensor) -> tuple[Tensor, Tensor]:
    """Where each row of flags [.., n] is set: (numbers [.., n] int32, count [..] int32).

    The first `count` numbers of a row are those of its flags, ascending; the rest is undefined.
    """
    width = flags.shape[-1]
    place = torch.where(flags, flags.cumsum(-1) - 1, width)
    numbers = torch.arange(width, dtype=torch.int32, device=flags.device).expand(flags.shape)
    found = numbers.new_zeros(*flags.shape[:-1], width + 1).scatter_(-1, place, numbers)
    return found[..., :width].contiguous(), flags.sum(-1, dtype=torch.int32)


def readers(chosen: Tensor, queries: int, pages: int) -> Tensor:
    """Which block of `queries` slots reads which page: [B, h_kv, blocks, pages] bool."""
    batch, length, groups, topk = chosen.shape
    blocks = -(-length // queries)
    missing = blocks * queries - length
    own = torch.nn.functional.pad(chosen, (0, 0, 0, 0, 0, missing), value=-1)
    own = own.view(batch, blocks, queries, groups, topk).permute(0, 3, 1, 2, 4).flatten(3)
    flags = torch.zeros(batch, groups, blocks, pages + 1, dtype=torch.bool, device=own.device)
    return flags.scatter_(3, torch.where(own < 0, pages, own).long(), True)[..., :pages]


class SequenceAttention(torch.autograd.Function):
    """The kernels as one differentiable function; arguments as in the op."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lmk_q: Tensor | None,
        summary_key: Tensor | None,
        summary_bias: Tensor | None,
        rule: Rule,
    ) -> tuple[Tensor, Tensor]:
        """The window, then the pages on top of it."""
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        batch, length, heads, dim = q.shape
        groups = k.shape[2]
        wide = rule.topk or rule.softmax1
        o = torch.empty_like(q, dtype=torch.float32 if wide else q.dtype)
        lse = q.new_empty(batch, length, heads, dtype=torch.float32)
        mass = torch.zeros_like(lse)
        shape = _shape(heads // groups, dim, rule.page_size)
        blocks = -(-length // (ROWS // shape[1]))
        grid, sizes = (blocks, groups, batch), (length, heads, groups)
        precision = _precision(q)
        masks = rule.window, *shape, ROWS, rule.aligned, rule.mask_landmarks, precision
        kernels.window_kernel[grid](q, k, v, o, lse, *sizes, dim**-0.5, *masks, num_warps=4)
        ctx.rule = rule
        if not rule.topk:
            if rule.softmax1:
                o = (o * torch.sigmoid(lse).unsqueeze(-1)).to(q.dtype)
                lse = torch.logaddexp(lse, torch.zeros_like(lse))
            ctx.save_for_backward(q, k, v, o, lse)
            ctx.mark_non_differentiable(mass)
            return o, mass
        assert lmk_q is not None and summary_key is not None and summary_bias is not None
        z, key = lmk_q.contiguous(), summary_key.contiguous()
        chosen, u = select(
            select_pages,
            z,
            key,
            summary_bias.contiguous(),
            lse,
            groups,
            (rule.page_size, rule.window, rule.topk),
        )
        pages = key.shape[1]
        flags = readers(chosen, ROWS // shape[1], pages)
        by_block = listed(flags)
        result, total = torch.empty_like(q), torch.empty_like(lse)
        kernels.pages_kernel[grid](
            q,
            k,
            v,
            chosen,
            u,
            *by_block,
            o,
            lse,
            result,
            total,
            mass,
            *sizes,
            pages,
            dim**-0.5,
            *shape,
            ROWS,
            rule.topk,
            gpu.next_power_of_2(rule.topk),
            rule.softmax1,
            precision,
            num_warps=4,
        )
        by_page = listed(flags.transpose(2, 3))
        ctx.save_for_backward(q, k, v, result, total, z, key, chosen, u, mass, *by_block, *by_page)
        return result, mass

    @staticmethod
    def backward(ctx: Any, do: Tensor, dmass: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of queries per block and of keys per page; no element is accumulated by two
        programs."""
        rule: Rule = ctx.rule
        q, k, v, o, lse, *rest = ctx.saved_tensors
        do = do.contiguous()
        delta = (do.float() * o.float()).sum(-1)
        # Placeholders: without pages none of these is read.
        z = key = chosen = u = block_list = block_count = page_list = page_count = dmass_of = lse
        if rest:
            z, key, chosen, u, mass, block_list, block_count, page_list, page_count = rest
            dmass_of = dmass.contiguous()
            delta = delta + dmass_of * mass
        batch, length, heads, dim = q.shape
        groups, pages = k.shape[2], length // rule.page_size
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        dz, dkey = torch.empty_like(z), torch.empty_like(key)
        dbias = lse.new_empty(batch, pages, heads)
        group, padded, _, _ = shape = _shape(heads // groups, dim, rule.page_size)
        blocks = -(-length // (ROWS // padded))
        # Arguments of both backward kernels.
        shared = {
            "IDX": chosen,
            "U": u,
            "DO": do,
            "DMASS": dmass_of,
            "LSE": lse,
            "DELTA": delta,
            "L": length,
            "H": heads,
            "KV": groups,
            "scale": dim**-0.5,
            "window": rule.window,
            "G": group,
            "GP": padded,
            "HP": max(MIN_HEADS, padded),
            "D": shape[2],
            "S": shape[3],
            "ROWS": ROWS,
            "ALIGNED": rule.aligned,
            "MASK": rule.mask_landmarks,
            "TOPK": rule.topk,
            "KP": gpu.next_power_of_2(max(1, rule.topk)),
            "PRECISION": _precision(q),
            "num_warps": 4,
        }
        kernels.queries_kernel[(blocks, groups, batch)](
            q, k, v, R=key, LIST=block_list, COUNT=block_count, DQ=dq, DZ=dz, N=pages, **shared
        )
        kernels.keys_kernel[(pages, groups, batch)](
            q,
            k,
            v,
            z,
            LIST=page_list,
            COUNT=page_count,
            DK=dk,
            DV=dv,
            DR=dkey,
            DB=dbias,
            BLOCKS=blocks,
            **shared,
        )
        if not rest:
            return dq, dk, dv, None, None, None, None
        return dq, dk, dv, dz, dkey, dbias, None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lmk_q: Tensor | None,
    summary_key: Tensor | None,
    summary_bias: Tensor | None,
    rule: Rule,
) -> tuple[Tensor, Tensor]:
    """sequence_attention with the kernels."""
    call: Callable[..., tuple[Tensor, Tensor]] = SequenceAttention.apply
    return call(q, k, v, lmk_q, summary_key, summary_bias, rule)


def _shape(group: int, dim: int, page_size: int) -> tuple[int, int, int, int]:
    """Heads of a group, the same padded, head dim, page size."""
    return group, gpu.next_power_of_2(group), dim, page_size


def _precision(q: Tensor) -> str:
    return "ieee" if q.dtype == torch.float32 else "tf32"
