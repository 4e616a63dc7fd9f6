"""Benchmark points of this family's ops, for `cairn bench ops`."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.bench_points import Draw, Point, Points, moved
from cairn.ops.cache.quantized import BYTES
from cairn.ops.sparse_mla import index_cache, records
from cairn.ops.sparse_mla.fused_store_index_k_cache import fused_store_index_k_cache
from cairn.ops.sparse_mla.index_k_gather import index_k_gather
from cairn.ops.sparse_mla.index_k_store import index_k_store
from cairn.ops.sparse_mla.index_q_quantize import index_q_quantize
from cairn.ops.sparse_mla.latent_norm_rope import latent_norm_rope
from cairn.ops.sparse_mla.latent_query_rope import latent_query_rope
from cairn.ops.sparse_mla.mla_kv_store import mla_kv_store
from cairn.ops.sparse_mla.paged_mla import paged_mla
from cairn.ops.sparse_mla.paged_mqa_logits import paged_mqa_logits_into
from cairn.ops.sparse_mla.ragged_mqa_logits import ragged_mqa_logits_into
from cairn.ops.sparse_mla.samples import decode_steps, is_tiny, sizes_of, token_counts
from cairn.ops.sparse_mla.select_topk import select_topk
from cairn.ops.sparse_mla.set_mla_kv_buffer import set_mla_kv_buffer
from cairn.ops.sparse_mla.sparse_mla import sparse_mla
from cairn.ops.top_k.samples import points


@index_k_gather.bench
def _(draw: Draw) -> Points:
    for step in decode_steps(draw):
        dim, size = step.sizes.index_dim, step.sizes.page
        token = dim + index_cache.SCALE_BYTES
        cache = draw.randint(0, 127, step.pages, size * token, dtype=BYTES)
        first = step.page_table.long().flatten() * size
        location = (first.unsqueeze(1) + draw.arange(size)).flatten()
        yield Point(
            str(step),
            draw.args(cache, location, dim),
            moved(location) + 2 * len(location) * token,
            alternatives=draw.by_torch(index_k_gather.reference),
        )


@index_k_store.bench
def _(draw: Draw) -> Points:
    sizes = sizes_of(draw)
    token = sizes.index_dim + index_cache.SCALE_BYTES
    for tokens in token_counts(draw):
        k = draw.randn(tokens, sizes.index_dim)
        pages = tokens // sizes.page + 64
        cache = draw.randint(0, 127, pages, sizes.page * token, dtype=BYTES)
        location = draw.rand(pages * sizes.page).argsort()[:tokens]
        yield Point(
            f"{tokens} x {sizes.index_dim}",
            draw.args(k, cache, location),
            moved(k, location) + tokens * token,
            alternatives=draw.by_torch(index_k_store.reference),
        )


@fused_store_index_k_cache.bench
def _(draw: Draw) -> Points:
    sizes = sizes_of(draw)
    token = sizes.index_dim + index_cache.SCALE_BYTES
    for tokens in token_counts(draw):
        k, pages = draw.randn(tokens, sizes.index_dim), tokens // sizes.page + 64
        cache = draw.randint(0, 127, pages, sizes.page * token, dtype=BYTES)
        location = draw.rand(pages * sizes.page).argsort()[:tokens]
        yield Point(
            f"{tokens} x {sizes.index_dim}",
            draw.args(k, cache, location, sizes.page),
            moved(k, location) + tokens * token,
        )


@set_mla_kv_buffer.bench
def _(draw: Draw) -> Points:
    sizes = sizes_of(draw)
    widths = (sizes.latent, sizes.rope)
    for tokens in token_counts(draw):
        latent, k_pe = (draw.randn(tokens, width) for width in widths)
        buffer = draw.randn(2 * tokens, sum(widths))
        location = draw.rand(len(buffer)).argsort()[:tokens]
        yield Point(
            f"{tokens} x {sum(widths)}",
            draw.args(buffer, location, latent, k_pe),
            2 * moved(latent, k_pe) + moved(location),
        )


@index_q_quantize.bench
def _(draw: Draw) -> Points:
    sizes = sizes_of(draw)
    for tokens in token_counts(draw):
        q = draw.randn(tokens, sizes.index_heads, sizes.index_dim)
        weights = draw.randn(tokens, sizes.index_heads, dtype=torch.float32)
        for hadamard in (False, True):
            yield Point(
                f"{tokens} x {sizes.index_heads} x {sizes.index_dim}" + ", rotated" * hadamard,
                draw.args(q, weights, hadamard),
                moved(q) + q.numel() + 2 * moved(weights),
                alternatives=draw.by_torch(index_q_quantize.reference),
            )


@latent_norm_rope.bench
def _(draw: Draw) -> Points:
    sizes = sizes_of(draw)
    for tokens in token_counts(draw):
        widths = (sizes.query, sizes.latent, sizes.rope)
        projected, key = draw.randn(tokens, sum(widths)), draw.randn(tokens, sizes.index_dim)
        weights = [draw.randn(width) for width in (*widths[:2], sizes.index_dim, sizes.index_dim)]
        angles = [draw.randn(tokens, sizes.rope, dtype=torch.float32) for _ in range(2)]
        yield Point(
            f"{tokens} x {sum(widths)}",
            draw.args(projected, key, *weights, *angles),
            2 * moved(projected, key) + moved(*weights, *angles),
            alternatives=draw.by_torch(latent_norm_rope.reference),
        )


@latent_query_rope.bench
def _(draw: Draw) -> Points:
    sizes = sizes_of(draw)
    nope, rope = sizes.latent // 4, sizes.rope
    for tokens in token_counts(draw):
        for heads in (2,) if is_tiny(draw) else (128, 16):
            columns = heads * (nope + rope) + sizes.index_heads * sizes.index_dim
            projected = draw.randn(tokens, columns)
            q = draw.randn(tokens, heads, sizes.latent + rope)
            weights = draw.randn(tokens, sizes.index_heads, dtype=torch.float32)
            angles = [draw.randn(tokens, rope, dtype=torch.float32) for _ in range(2)]
            rotated = tokens * (heads * rope + sizes.index_heads * sizes.index_dim)
            yield Point(
                f"{tokens} x {heads} heads",
                draw.args(projected, q, weights, *angles, nope, 0.1),
                2 * rotated * q.element_size() + 2 * moved(weights) + moved(*angles),
                alternatives=draw.by_torch(latent_query_rope.reference),
            )


@mla_kv_store.bench
def _(draw: Draw) -> Points:
    sizes = sizes_of(draw)
    widths = (sizes.latent, sizes.rope)
    for tokens in token_counts(draw):
        pages = tokens // sizes.page + 64
        latent, k_pe = (draw.randn(tokens, width) for width in widths)
        location = draw.rand(pages * sizes.page).argsort()[:tokens]
        shape = (pages, sizes.page)
        plain = draw.randn(*shape, sum(widths))
        small = draw.randint(0, 127, *shape, records.record_bytes(*widths), dtype=BYTES)
        for kind, cache in (("plain", plain), ("float8", small)):
            yield Point(
                f"{tokens}, {kind}",
                draw.args(latent, k_pe, cache, location),
                moved(latent, k_pe, location) + tokens * cache[0, 0].nbytes,
                alternatives=draw.by_torch(mla_kv_store.reference),
            )


@paged_mqa_logits_into.bench
def _(draw: Draw) -> Points:
    for step in decode_steps(draw):
        heads, dim, size = step.sizes.index_heads, step.sizes.index_dim, step.sizes.page
        keys = step.tokens * step.context
        token = dim + index_cache.SCALE_BYTES
        cache = draw.randint(0, 60, step.pages, size * token, dtype=BYTES)
        q = draw.randn(step.tokens, heads, dim)
        numbers = index_cache.quantize(q, scale_ue8m0=False)[0]
        weights = draw.randn(step.tokens, heads, dtype=torch.float32)
        row = draw.arange(step.tokens)
        context = draw.full((step.tokens,), step.context, torch.int32)
        logits = draw.full((step.tokens, step.context), 0, torch.float32)
        yield Point(
            str(step),
            draw.args(numbers, weights, cache, step.page_table, row, context, logits),
            moved(cache, numbers, weights) + 4 * keys,
            2.0 * keys * heads * dim,
        )


@ragged_mqa_logits_into.bench
def _(draw: Draw) -> Points:
    sizes = sizes_of(draw)
    heads, dim = sizes.index_heads, sizes.index_dim
    for tokens, length in ((5, 64),) if is_tiny(draw) else ((2048, 8192), (2048, 32768)):
        q, k = draw.randn(tokens, heads, dim), draw.randn(length, dim)
        numbers = index_cache.quantize(q, scale_ue8m0=False)[0]
        keys, scale = index_cache.quantize(k, scale_ue8m0=False)
        weights = draw.randn(tokens, heads, dtype=torch.float32)
        end = draw.arange(tokens, torch.int32) + (length - tokens + 1)
        logits = draw.full((tokens, length), 0, torch.float32)
        pairs = tokens * (length - (tokens - 1) / 2)
        yield Point(
            f"{tokens} x {length}",
            draw.args(numbers, weights, keys, scale, torch.zeros_like(end), end, logits),
            moved(numbers, weights, keys, scale) + int(4 * pairs),
            2.0 * pairs * heads * dim,
        )


def _by_topk(logits: Tensor, count: Tensor, topk: int) -> Tensor:
    """torch.topk, for tokens with equally many candidates."""
    return logits.topk(topk).indices.sort().values.to(torch.int32)


@select_topk.bench
def _(draw: Draw) -> Points:
    return points(draw, _by_topk)


@sparse_mla.bench
def _(draw: Draw) -> Points:
    sizes = sizes_of(draw)
    widths = (sizes.latent, sizes.rope)
    # DeepSeek's 128 heads on one device, and its share of one of eight; the last size is a chunk of
    # a prefill.
    steps = ((64, 128), (64, 64), (64, 16), (4, 128), (1, 128), (8192, 128))
    for tokens, heads in ((3, 4),) if is_tiny(draw) else steps:
        rows, each = min(tokens, 64), 2 * sizes.topk
        pages = rows * each // sizes.page
        cache = draw.randn(pages, sizes.page, sum(widths))
        parts = (part.flatten(0, 1) for part in cache.split(widths, dim=-1))
        small = records.quantize(*parts).view(pages, sizes.page, -1)
        q = draw.randn(tokens, heads, sum(widths))
        some = draw.rand(tokens, each).argsort(dim=1)[:, : sizes.topk].sort().values
        cells = (some + each * (draw.arange(tokens) % rows).unsqueeze(1)).to(torch.int32)
        length = draw.full((tokens,), sizes.topk, torch.int32)
        read = min(cells.numel(), pages * sizes.page)
        for kind, of in (("plain", cache), ("float8", small)):
            yield Point(
                f"{tokens} x {heads} heads, {kind}",
                draw.args(q, of, cells, length, 0.1, sizes.latent, None, q.dtype),
                moved(q, q[..., : sizes.latent], cells) + read * of[0, 0].nbytes,
                2.0 * cells.numel() * heads * (2 * widths[0] + widths[1]),
            )


@paged_mla.bench
def _(draw: Draw) -> Points:
    for step in decode_steps(draw):
        sizes, heads = step.sizes, 4 if is_tiny(draw) else 16
        if step.tokens * step.context > 1 << 20:
            continue
        cache = draw.randn(step.pages, sizes.page, sizes.latent + sizes.rope)
        q = draw.randn(step.tokens, heads, sizes.latent + sizes.rope)
        row = draw.arange(step.tokens)
        end = draw.full((step.tokens,), step.context, torch.int32)
        yield Point(
            f"{step}, {heads} heads",
            draw.args(q, cache, step.page_table, row, end, 0.1, sizes.latent),
            moved(q, cache) + step.tokens * heads * 4 * sizes.latent,
            2.0 * step.tokens * step.context * heads * (2 * sizes.latent + sizes.rope),
        )
