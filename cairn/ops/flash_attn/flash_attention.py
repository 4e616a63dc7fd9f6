"""Attention of ragged or padded queries over contiguous, ragged or paged keys."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.flash_attn import launch, library, wgmma_launch
from cairn.ops.registry import op
from cairn.ops.testing import Arguments, Make

WIDEST_KEY, WIDEST_VALUE = 256, 512
"""Largest head dims of the Triton kernels: tiles of wider heads exceed shared memory."""
_SCORES = 1 << 24
"""Most scores that the definition holds at a time."""


@op(mutates=("o", "lse"))
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    page_table: Tensor | None,
    batch_idx: Tensor | None,
    leftpad: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    qv: Tensor | None,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    left: int,
    right: int,
    chunk: int,
    softcap: float,
    max_seqlen_q: int,
) -> None:
    """Softmax attention in float32, as `flash_attn_with_kvcache` describes it.

    The keys of sequence b are numbered 0 .. n - 1 from leftpad[b] (or 0) on. Query i of its m has
    position a = i + n - m and attends to keys max(a - left, 0) .. min(a + right, n - 1), with a
    chunk c > 0 only to those in a's block of c keys.

    Args:
        q: [B, Sq, H, d], or [T, H, d] with cu_seqlens_q.
        k, v: [B', Sk, Hk, d] and [.., dv]; [pages, P, Hk, ..] with page_table; [T', Hk, ..] with
            cu_seqlens_k. Query head h reads head h // (H / Hk).
        o: like q with dv, written: 0 beyond seqused_q and for queries without a key.
        lse: [B, H, Sq] or [H, T] float32, written: natural logarithm; +inf for these rows.
        page_table: [B, n] int32.
        batch_idx: [B] int32, row of k and v for each sequence.
        leftpad: [B] int32, number of invalid keys at the front.
        cu_seqlens_q, cu_seqlens_k: [B + 1] int32.
        seqused_q, seqused_k: [B] int32, used lengths, including leftpad.
        qv: [.., H, dv]; its product with v is added to the score.
        q_descale, k_descale, v_descale: [B, Hk] float32, factors.
        sinks: [H]; e^sink is added to the denominator of o, not to lse.
        scale: softmax scale.
        left, right, chunk: window sizes (-1: unbounded), and chunk size (0: none).
        softcap: c > 0: the score becomes c * tanh(score / c).
        max_seqlen_q: upper bound of the queries of a sequence.
    """
    keys = Keys(k, v, page_table, batch_idx, leftpad, cu_seqlens_k, seqused_k)
    group = q.shape[-2] // k.shape[-2]
    for row, (at, count, many) in enumerate(_spans(q, cu_seqlens_q, seqused_q)):
        source, sink, logs = (q, o, lse) if q.dim() == 3 else (q[row], o[row], lse[row])
        sink[at : at + count] = 0
        logs[:, at : at + count] = torch.inf
        if not many:  # its keys may lie nowhere
            continue
        key, value = (x.float().repeat_interleave(group, 1) for x in keys.of(row))
        factors = [
            1.0 if x is None else x[row].float().repeat_interleave(group).view(-1, 1, 1)
            for x in (q_descale, k_descale, v_descale)
        ]
        step = max(1, _SCORES // max(1, q.shape[-2] * len(key)))
        for first in range(0, many, step):
            lines = slice(at + first, at + min(many, first + step))
            scores = torch.einsum("qhd,khd->hqk", source[lines].float(), key)
            if qv is not None:
                extra = qv[lines] if qv.dim() == 3 else qv[row, lines]
                scores += torch.einsum("qhd,khd->hqk", extra.float(), value)
            scores *= factors[0] * factors[1] * scale
            if softcap > 0:
                scores = softcap * torch.tanh(scores / softcap)
            place = torch.arange(lines.start, lines.stop, device=q.device) - at + len(key) - many
            hidden = _hidden(place, len(key), left, right, chunk)
            # Values that no query sees may hold NaN, which a weight of 0 would not remove.
            seen = value.masked_fill(hidden.all(0).view(-1, 1, 1), 0)
            part, log = weigh(scores.masked_fill_(hidden, -torch.inf), seen, sinks)
            sink[lines] = (part * factors[2]).transpose(0, 1).to(o.dtype)
            logs[:, lines] = log


@dataclass(frozen=True)
class Keys:
    """Keys and values of a batch in any layout; as in the op."""

    k: Tensor
    v: Tensor
    page_table: Tensor | None
    batch_idx: Tensor | None
    leftpad: Tensor | None
    cu_seqlens: Tensor | None
    seqused: Tensor | None

    def of(self, row: int) -> tuple[Tensor, Tensor]:
        """[n, Hk, d] and [n, Hk, dv] of one sequence."""
        first = 0 if self.leftpad is None else int(self.leftpad[row])
        last = None if self.seqused is None else int(self.seqused[row])
        span = slice(first, last)
        if self.cu_seqlens is not None:
            begin, end = self.cu_seqlens[row : row + 2].tolist()
            return self.k[begin:end][span], self.v[begin:end][span]
        if self.page_table is None:
            line = row if self.batch_idx is None else int(self.batch_idx[row])
            return self.k[line, span], self.v[line, span]
        size = self.k.shape[1]
        pages = self.page_table[row, : None if last is None else -(-last // size)].long()
        return self.k[pages].flatten(0, 1)[span], self.v[pages].flatten(0, 1)[span]


def _spans(
    q: Tensor, cu_seqlens: Tensor | None, seqused: Tensor | None
) -> list[tuple[int, int, int]]:
    """First row, number of rows and number of used rows of every sequence's queries."""
    if cu_seqlens is None:
        begins, counts = [0] * q.shape[0], [q.shape[1]] * q.shape[0]
    else:
        begins, counts = cu_seqlens[:-1].tolist(), cu_seqlens.diff().tolist()
    return list(zip(begins, counts, counts if seqused is None else seqused.tolist(), strict=True))


def _hidden(place: Tensor, keys: int, left: int, right: int, chunk: int) -> Tensor:
    """[queries, keys] bool: keys masked for a query at `place`."""
    query, key = place.unsqueeze(1), torch.arange(keys, device=place.device)
    hidden = torch.zeros(len(place), keys, dtype=torch.bool, device=place.device)
    if left >= 0:
        hidden |= key < query - left
    if right >= 0:
        hidden |= key > query + right
    if chunk > 0:
        hidden |= key // chunk != torch.div(query, chunk, rounding_mode="floor")
    return hidden


def weigh(scores: Tensor, value: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Softmax of scores [H, Q, K] over value [K, H, dv]: ([H, Q, dv], lse [H, Q])."""
    lse = torch.logsumexp(scores, dim=-1)
    denominator = lse
    if sinks is not None:
        denominator = torch.logaddexp(lse, sinks.float().unsqueeze(1))
    weights = (scores - denominator.clamp(min=torch.finfo(torch.float32).min).unsqueeze(-1)).exp()
    o = torch.einsum("hqk,khd->hqd", weights, value)
    return o, lse.masked_fill(lse == -torch.inf, torch.inf)


def _plain(call: Call) -> bool:
    return library.plain(launch.Task(*call.astuple()))


def _grouped(call: Call) -> bool:
    return wgmma_launch.fits(launch.Task(*call.astuple()))


@flash_attention.implementation(
    "sdpa",
    devices=("cpu",),
    when=_plain,
)
def _(call: Call) -> None:
    task = launch.Task(*call.astuple())
    q, o, lse = task.q, task.o, task.lse
    keys = Keys(
        task.k,
        task.v,
        task.page_table,
        task.batch_idx,
        task.leftpad,
        task.cu_seqlens_k,
        task.seqused_k,
    )
    spans = _spans(q, task.cu_seqlens_q, task.seqused_q)
    for row, (at, count, many) in enumerate(spans):
        source, sink, logs = (q, o, lse) if q.dim() == 3 else (q[row], o[row], lse[row])
        there, beyond = slice(at, at + many), slice(at + many, at + count)
        if many:
            own = keys.of(row)
            sink[there], logs[:, there] = library.attend_sequence(task, source[there], *own)
        sink[beyond], logs[:, beyond] = 0, torch.inf


@flash_attention.implementation(
    "gluon",
    devices=gpu.DEVICES,
    when=_grouped,
    missing="" if gpu.gl else "needs Triton 3.6",
    replayed=True,
)
def _(call: Call) -> None:
    wgmma_launch.attend(launch.Task(*call.astuple()))


def _narrow(call: Call) -> bool:
    """Whether tiles of these heads fit into shared memory."""
    return call.k.shape[-1] <= WIDEST_KEY and call.v.shape[-1] <= WIDEST_VALUE


@flash_attention.implementation("triton", devices=gpu.DEVICES, when=_narrow, replayed=True)
def _(call: Call) -> None:
    launch.attend(launch.Task(*call.astuple()))


def drawn(make: Make, dtype: torch.dtype, **options: Any) -> Arguments:
    """A random call of the op. Unused slots are NaN, and so is o.

    Args:
        queries, keys: numbers of every sequence.
        heads: (H, Hk); widths: (d, dv).
        page: page size P; 0: contiguous; -1: ragged.
        even: queries [B, Sq, H, d] padded to the longest sequence.
        pad: invalid keys at the front. qv, descale, sinks: whether to pass these.
        others: scale, left, right, chunk, softcap.
    """
    queries, keys = options["queries"], options["keys"]
    (heads, kv_heads), (dim, wide) = options["heads"], options["widths"]
    page, even, pad = options.get("page", 0), options.get("even", False), options.get("pad", 0)
    batch, longest = len(queries), max(queries, default=0)
    lead = (batch, longest) if even else (sum(queries),)
    int32 = torch.int32
    ends = make.tensor([0, *accumulate(queries)], int32)
    begins = make.tensor([0, *accumulate(keys)], int32)
    used = make.tensor(keys, int32)
    table = None
    if page > 0:
        most = max(-(-n // page) for n in keys)
        table = make.rand(batch * most).argsort().view(batch, most).int()
        size: tuple[int, ...] = (batch * most, page)
    else:
        size = (sum(keys),) if page < 0 else (batch, max(keys, default=0))
    caches = [make.randn(*size, kv_heads, width, dtype=dtype) for width in (dim, wide)]
    if page >= 0:
        for cache in caches:
            for row, length in enumerate(keys):
                lines = cache[table[row].long()].flatten(0, 1) if table is not None else cache[row]
                lines[length:] = lines[:pad] = torch.nan
                if table is not None:
                    cache[table[row].long()] = lines.view(-1, *cache.shape[1:])
    descales = [make.rand(batch, kv_heads) + 0.5 if options.get("descale") else None] * 3
    window = (options.get("left", -1), options.get("right", -1), options.get("chunk", 0))
    out = torch.bfloat16 if dtype.itemsize == 1 else dtype
    return make.args(
        make.randn(*lead, heads, dim, dtype=dtype),
        *caches,
        make.empty(*lead, heads, wide, dtype=out),
        make.empty(*lead[:-1], heads, lead[-1]),
        table,
        None,
        make.full((batch,), pad, int32) if pad else None,
        None if even else ends,
        begins if page < 0 else None,
        make.tensor(queries, int32) if even else None,
        None if page < 0 else used,
        make.randn(*lead, heads, wide, dtype=dtype) if options.get("qv") else None,
        *descales,
        make.randn(heads) if options.get("sinks") else None,
        options.get("scale", 0.2),
        *window,
        options.get("softcap", 0.0),
        longest,
    )


flash_attention.tolerance(
    {torch.float32: (1e-4, 1e-5), torch.bfloat16: (1.6e-2, 1e-2)},
    "sums in another order under a softmax; weights are rounded to the values' dtype",
)
