"""Benchmark points of this family's ops, for `cairn bench ops`."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.attention.cutlass_mla_decode import LATENT, ROPE, cutlass_mla_decode
from cairn.ops.attention.dense_attention import dense_attention
from cairn.ops.attention.merge_states import merge_states
from cairn.ops.attention.window_attention import window_attention
from cairn.ops.bench_points import Alternative, Draw, Point, Points, moved


@cutlass_mla_decode.bench
def _(draw: Draw) -> Points:
    tiny = all(layer.name == "tiny" for layer in draw.layers)
    size = 16 if tiny else 64
    sizes = [(batch, length, 128) for batch, length in ((1, 8192), (32, 4096), (8, 131072))]
    # DeepSeek's 128 heads divided over eight devices: 16 each.
    sizes += [(32, 4096, 16), (8, 131072, 16)]
    for batch, length, heads in [(2, 100, 4)] if tiny else sizes:
        pages = -(-length // size)
        table = draw.rand(batch * pages).argsort().view(batch, pages).int()
        cache = draw.randn(batch * pages, size, LATENT + ROPE)
        q = draw.randn(batch, heads, LATENT + ROPE)
        lengths = draw.full((batch,), length, torch.int32)
        queries = (q[..., :LATENT], q[..., LATENT:])
        rows, keys = batch * length, cache.view(batch, 1, pages * size, -1)[:, :, :length]
        yield Point(
            f"{batch} x {length} x {heads} heads",
            draw.args(*queries, cache, lengths, table, None, 0.1),
            rows * cache.shape[2] * cache.element_size(),
            2.0 * rows * heads * (2 * LATENT + ROPE),
            (Alternative("sdpa", _sdpa, draw.args(q, keys)),),
        )


def _sdpa(q: Tensor, keys: Tensor) -> Tensor:
    """Baseline by torch's scaled_dot_product_attention on contiguous keys, without paging: [B, 1,
    length, latent + rope]."""
    shared = torch.nn.functional.scaled_dot_product_attention(
        q.unsqueeze(1), keys, keys[..., :LATENT], scale=0.1
    )
    return shared.squeeze(1)


@dense_attention.bench
def _(draw: Draw) -> Points:
    for job in draw.attention():
        where = (job.row, job.slot, job.page_table)
        yield Point(
            str(job),
            draw.args(job.q, job.k_cache, job.v_cache, *where, segments=job.segments),
            job.step.batch * job.step.context * job.slot_bytes + moved(job.q, job.q),
            job.attend_flops(job.pairs()),
            job.dense(),
        )


@merge_states.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.rows():
        shape = (rows, layer.heads, layer.head_dim)
        v_a, v_b, v = (draw.randn(*shape) for _ in range(3))
        s_a, s_b, s = (draw.randn(*shape[:2], dtype=torch.float32) for _ in range(3))
        yield Point(
            f"{layer.name}: {rows} x {layer.heads} x {layer.head_dim}",
            draw.args(v_a, s_a, v_b, s_b, v, s),
            moved(v_a, v_a, v_b, s_a, s_a, s_b),
            alternatives=draw.by_torch(merge_states.reference),
        )


@window_attention.bench
def _(draw: Draw) -> Points:
    for job in draw.attention():
        window = job.layer.window
        given = (job.q, job.k_cache, job.v_cache, job.row, job.slot, job.page_table, window)
        kinds = {"aligned": True, "mask_landmarks": True, "dtype": job.q.dtype}
        yield Point(
            str(job),
            draw.args(*given, **kinds),
            job.window_bytes + moved(job.q, job.q),
            job.attend_flops(job.pairs(window)),
            job.sdpa_window(),
        )
