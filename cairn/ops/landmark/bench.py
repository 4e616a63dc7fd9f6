"""Benchmark points of this family's ops, for `cairn bench ops`."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.bench_points import Alternative, Draw, Point, Points, moved
from cairn.ops.landmark.blend_window import blend_window
from cairn.ops.landmark.framed_attention import framed_attention
from cairn.ops.landmark.landmark_attention import landmark_attention
from cairn.ops.landmark.mean_summary import mean_summary
from cairn.ops.landmark.page_attention import page_attention
from cairn.ops.landmark.page_weights import page_weights
from cairn.ops.landmark.prior_summary import prior_summary
from cairn.ops.landmark.select_pages import select_pages
from cairn.ops.landmark.select_task import candidate_pages
from cairn.ops.landmark.store_prior_summary import store_prior_summary


@blend_window.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.rows():
        shape = (rows, layer.heads, layer.head_dim)
        pages, window = (draw.randn(*shape, dtype=torch.float32) for _ in range(2))
        weight = draw.rand(*shape[:2])
        yield Point(
            f"{layer.name}: {rows} x {layer.heads} x {layer.head_dim}",
            draw.args(pages, window, weight, draw.dtype),
            moved(pages, window, weight) + pages.numel() * draw.dtype.itemsize,
            alternatives=draw.by_torch(blend_window.reference),
        )


@framed_attention.bench
def _(draw: Draw) -> Points:
    for job in draw.attention():
        layer, (key, bias) = job.layer, draw.summaries(job)
        pages, heads = len(job.k_cache), layer.kv_heads
        if job.q.shape[0] > layer.window:
            continue
        caches = (job.k_cache, job.v_cache)
        frame_of = draw.arange(pages, dtype=torch.int32).expand(heads, -1).contiguous()
        where = (job.row, job.slot, job.page_table, job.page_table, layer.window, layer.topk)
        yield Point(
            str(job),
            draw.args(job.q, job.q, *caches * 3, frame_of, key, bias, *where, True),
            job.window_bytes + job.selected_bytes + job.summary_bytes + 3 * moved(job.q),
        )


@landmark_attention.bench
def _(draw: Draw) -> Points:
    for job in draw.attention():
        layer, (key, bias) = job.layer, draw.summaries(job)
        where = (job.row, job.slot, job.page_table, layer.window, layer.topk)
        read = layer.topk * (layer.page_size - 1)
        for name, z in draw.landmark_queries(job):
            yield Point(
                f"{job}{name}",
                draw.args(job.q, z, job.k_cache, job.v_cache, key, bias, *where, True),
                job.window_bytes + job.selected_bytes + job.summary_bytes + moved(z, z, z),
                job.attend_flops(job.pairs(layer.window) + job.q.shape[0] * read) + job.score_flops,
                job.dense(),
            )


@mean_summary.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.rows():
        count = -(-rows // layer.page_size)
        cache = draw.randn(2 * count, layer.kv_heads, layer.page_size, layer.head_dim)
        pages = draw.rand(2 * count).argsort()[:count]
        yield Point(
            f"{layer.name}: pages of {rows} slots",
            draw.args(cache, pages),
            moved(cache[:count], cache[:count, :, 0]),
            alternatives=draw.by_torch(mean_summary.reference),
        )


@page_attention.bench
def _(draw: Draw) -> Points:
    definition = Alternative("definition", page_attention.reference)
    for job in draw.attention():
        layer, (key, bias) = job.layer, draw.summaries(job)
        lse = draw.randn(*job.q.shape[:2], dtype=torch.float32)
        for name, z in draw.landmark_queries(job):
            where, rule = (job.row, job.slot, job.page_table), (layer.window, layer.topk)
            indices, scores = select_pages(
                z, key, bias, lse, *where, layer.page_size, *rule, num_kv_heads=layer.kv_heads
            )
            weights = torch.softmax(scores, dim=-1)
            yield Point(
                f"{job}{name}",
                draw.args(
                    job.q, job.k_cache, job.v_cache, job.row, job.page_table, indices, weights
                ),
                job.selected_bytes + moved(job.q, job.q, indices, weights),
                job.attend_flops(job.q.shape[0] * layer.topk * (layer.page_size - 1)),
                # The definition takes seconds with many tokens.
                (definition,) if job.step.tokens == 1 else (),
            )


@page_weights.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.rows():
        scores = draw.randn(rows, layer.heads, layer.topk, dtype=torch.float32)
        lse = draw.randn(rows, layer.heads, dtype=torch.float32)
        yield Point(
            f"{layer.name}: {rows} x {layer.heads} x {layer.topk}",
            draw.args(scores, lse, True),
            moved(scores, scores, lse, lse),
            alternatives=draw.by_torch(page_weights.reference),
        )


@prior_summary.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.rows():
        count = -(-rows // layer.page_size)
        cache = draw.randn(2 * count, layer.kv_heads, layer.page_size, layer.head_dim)
        pages = draw.rand(2 * count).argsort()[:count]
        query = draw.randn(count, layer.heads, layer.head_dim)
        yield Point(
            f"{layer.name}: pages of {rows} slots",
            draw.args(query, cache, pages),
            moved(cache[:count], query, query) + 4 * count * layer.heads,
            4.0 * query.numel() * layer.page_size,
            draw.by_torch(prior_summary.reference),
        )


def _by_topk(
    z: Tensor,
    key: Tensor,
    bias: Tensor,
    lse: Tensor,
    pages: Tensor,
    candidates: Tensor,
    *options: int,
) -> tuple[Tensor, Tensor]:
    """The strategy hils by torch's operators, for one page list [n, C] per row; options: h_kv,
    K."""
    groups, topk = options
    queries = z.view(pages.shape[0], -1, *z.shape[1:]).transpose(1, 2)
    u = queries @ key[pages].permute(0, 2, 3, 1) * z.shape[2] ** -0.5
    u = (u + bias[pages].transpose(1, 2).unsqueeze(2)).transpose(1, 2).flatten(0, 1)
    outside = torch.arange(u.shape[2], device=u.device) >= candidates[:, None, None]
    u = u.float().masked_fill(outside, -torch.inf)
    score = u - torch.logaddexp(lse, u.logsumexp(dim=2)).unsqueeze(2)
    found = score.unflatten(1, (groups, -1)).amax(dim=2).topk(topk).indices.sort(dim=-1).values
    return found, u.unflatten(1, (groups, -1)).gather(
        3, found.unsqueeze(2).expand(-1, -1, u.shape[1] // groups, -1)
    )


@select_pages.bench
def _(draw: Draw) -> Points:
    for job in draw.attention():
        layer, (key, bias) = job.layer, draw.summaries(job)
        z, lse = draw.randn(*job.q.shape), draw.randn(*job.q.shape[:2], dtype=torch.float32)
        rule = (layer.page_size, layer.window, layer.topk)
        pages = job.page_table[:, : job.candidates].long()
        candidates = candidate_pages(job.slot, layer.page_size, layer.window, "hils")
        plain = draw.args(z, key, bias, lse, pages, candidates, layer.kv_heads, layer.topk)
        yield Point(
            str(job),
            draw.args(
                z,
                key,
                bias,
                lse,
                job.row,
                job.slot,
                job.page_table,
                *rule,
                num_kv_heads=layer.kv_heads,
            ),
            job.summary_bytes + moved(z),
            job.score_flops,
            (Alternative("topk", _by_topk, plain),),
        )


def _index_put(
    query: Tensor, k_cache: Tensor, pages: Tensor, key_pool: Tensor, bias_pool: Tensor
) -> None:
    """The definition for page ids that are all valid."""
    key_pool[pages], bias_pool[pages] = prior_summary.reference(query, k_cache, pages)


@store_prior_summary.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.rows():
        count = -(-rows // layer.page_size)
        cache = draw.randn(2 * count, layer.kv_heads, layer.page_size, layer.head_dim)
        pages = draw.rand(2 * count).argsort()[:count]
        query = draw.randn(count, layer.heads, layer.head_dim)
        keys = draw.randn(2 * count, layer.heads, layer.head_dim)
        biases = draw.rand(2 * count, layer.heads)
        yield Point(
            f"{layer.name}: pages of {rows} slots",
            draw.args(query, cache, pages, keys, biases),
            moved(cache[:count], query, query, biases[:count]),
            4.0 * query.numel() * layer.page_size,
            (Alternative("index_put", _index_put),),
        )
