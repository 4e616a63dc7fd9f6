"""Test cases of this family's ops."""

from __future__ import annotations

import torch

from cairn.ops.attention.cutlass_mla_decode import LATENT, ROPE, cutlass_mla_decode
from cairn.ops.attention.dense_attention import dense_attention
from cairn.ops.attention.merge_states import merge_states
from cairn.ops.attention.window_attention import window_attention
from cairn.ops.testing import Arguments, Cases, Make


def latents(
    make: Make,
    lengths: list[int],
    heads: int,
    size: int,
    widths: tuple[int, int],
    dtype: torch.dtype = torch.float32,
) -> Arguments:
    """A poisoned cache with its pages in random order; queries cut out of a wider buffer."""
    latent, rope = widths
    batch, most = len(lengths), max(-(-n // size) for n in lengths) + 1
    table = make.rand(batch * most).argsort().view(batch, most).int()
    slot = make.arange(most * size).view(most, size)
    cache = make.empty(batch * most, size, latent + rope, dtype=dtype)
    for row, length in enumerate(lengths):
        drawn = make.randn(most, size, latent + rope, dtype=dtype)
        hidden = (slot >= length).unsqueeze(-1)
        cache[table[row].long()] = torch.where(hidden, cache[table[row].long()], drawn)
    q = make.randn(batch, heads, latent + rope + 8, dtype=dtype)
    queries = (q[..., :latent], q[..., latent : latent + rope])
    spare = make.full((1,), 0, torch.uint8)
    return make.args(*queries, cache, make.tensor(lengths, torch.int32), table, spare, 0.2)


@cutlass_mla_decode.cases
def _(make: Make) -> Cases:
    yield latents(make, [70, 0, 1, 33], 3, 8, (32, 16))
    yield latents(make, [200], 20, 1, (24, 8))
    nobody = latents(make, [9], 3, 8, (32, 16)).args
    yield make.args(
        make.randn(0, 3, 32),
        make.randn(0, 3, 16),
        nobody[2],
        *(x[:0] for x in nobody[3:5]),
        *nobody[5:],
    )
    for dtype in (torch.float32, torch.bfloat16):
        yield latents(make, [7, 0, 300], 16, 64, (LATENT, ROPE), dtype)
    yield latents(make, [1000, 63, 100], 128, 16, (LATENT, ROPE), torch.bfloat16)
    yield latents(make, [0, 200], 40, 64, (LATENT, ROPE), torch.bfloat16)
    yield latents(make, [700, 1], 128, 128, (LATENT, ROPE), torch.bfloat16)


@dense_attention.cases
def _(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16):
        for size, heads, group in ((8, 2, 4), (16, 1, 1), (4, 3, 2)):
            lengths, counts = (75, 3, 140, 9), (60, 3, 30, 2)
            paged = make.paged(lengths, heads, size, 16, dtype=dtype)
            row, slot, _ = paged.queries(counts)
            q = make.randn(sum(counts), heads * group, 16, dtype=dtype)
            given = (q, paged.k_cache, paged.v_cache, row, slot, paged.page_table)
            yield make.args(*given)
            yield make.args(*given, scale=0.5, mask_landmarks=True)
            yield make.args(*given, chunked=True)
            mixed = make.rand(row.numel()).argsort()
            some = (q[mixed], *given[1:3], row[mixed], slot[mixed], paged.page_table)
            yield make.args(*some, mask_landmarks=True)
            few = (q[-3:], paged.k_cache, paged.v_cache, row[-3:], slot[-3:], paged.page_table)
            yield make.args(*few, mask_landmarks=True)
            none = (q[:0], paged.k_cache, paged.v_cache, row[:0], slot[:0], paged.page_table)
            yield make.args(*none)
            for form in make.kv_formats if size == 8 else ():
                bytes_of = paged.quantized(form)
                small = (q, bytes_of.k_cache, bytes_of.v_cache, row, slot, paged.page_table)
                yield make.args(*small, mask_landmarks=True)
    # Steps that the library implementation may take: a decode step and a mixed one; on a GPU also
    # prefill chunks that fill it, the last with cached keys before it, and keys in pairs of blocks.
    steps: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
        ((9, 300, 64), (1, 1, 1)),
        ((70, 200), (1, 150)),
    ]
    if make.device != "cpu":
        steps += [((3_000, 9, 700), (2_400, 1, 500)), ((14_000, 9), (5_000, 0))]
    for filled, running in steps:
        paged = make.paged(filled, 2, 64, 64, dtype=torch.bfloat16)
        row, slot, _ = paged.queries(running)
        q = make.randn(sum(running), 8, 64, dtype=torch.bfloat16)
        yield make.args(
            q,
            paged.k_cache,
            paged.v_cache,
            row,
            slot,
            paged.page_table,
            segments=paged.segments(running),
        )


@merge_states.cases
def _(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16):
        for shape, base2 in (((5, 3, 16), False), ((7, 1, 100), True), ((63, 5, 7), False)):
            v_a, v_b, poison = (make.randn(*shape, dtype=dtype) for _ in range(3))
            s_a, s_b = (make.randn(*shape[:2], scale=20.0) for _ in range(2))
            poison.fill_(torch.nan)
            empty = make.full(shape[:2], -torch.inf)
            out = (make.empty(*shape, dtype=dtype), make.empty(*shape[:2]), base2)
            yield make.args(v_a, s_a, v_b, s_b, *out)
            yield make.args(v_a, s_a, poison, empty, *out)
            yield make.args(poison, empty, poison, -empty, *out)
        none = (v_a[:0], s_a[:0])
        yield make.args(*none, *none, *none)


@window_attention.cases
def _(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16):
        for size, heads, group, window, dim in (
            *((8, 2, 4, 20, 16), (16, 1, 1, 16, 16), (4, 3, 2, 1, 16)),
            *(((64, 2, 3, 130, 64),) if dtype == torch.bfloat16 else ()),
        ):
            lengths = (75, 3, 40, 9) if size < 64 else (400, 3, 140, 65)
            counts = (60, 3, 1, 2)
            paged = make.paged(lengths, heads, size, dim, dtype=dtype)
            row, slot, _ = paged.queries(counts)
            q = make.randn(sum(counts), heads * group, dim, dtype=dtype)
            given = (q, paged.k_cache, paged.v_cache, row, slot, paged.page_table, window)
            for aligned in (False, True):
                for mask in (False, True):
                    yield make.args(*given, aligned=aligned, mask_landmarks=mask)
            yield make.args(*given, scale=0.5)
            yield make.args(*given, dtype=dtype)
            yield make.args(*given, mask_landmarks=True, chunked=True)
            mixed = make.rand(row.numel()).argsort()
            some = (q[mixed], *given[1:3], row[mixed], slot[mixed], paged.page_table)
            yield make.args(*some, window, mask_landmarks=True)
            few = (q[-3:], paged.k_cache, paged.v_cache, row[-3:], slot[-3:], paged.page_table)
            yield make.args(*few, window, aligned=True, mask_landmarks=True, dtype=dtype)
            for at in (slice(5, 6), slice(62, 63)):
                one = (q[at], paged.k_cache, paged.v_cache, row[at], slot[at], paged.page_table)
                yield make.args(*one, window, mask_landmarks=True, dtype=dtype)
            none = (q[:0], paged.k_cache, paged.v_cache, row[:0], slot[:0], paged.page_table)
            yield make.args(*none, window)
            for form in make.kv_formats if size == 8 else ():
                bytes_of = paged.quantized(form)
                small = (q, bytes_of.k_cache, bytes_of.v_cache, row, slot, paged.page_table)
                yield make.args(*small, window, aligned=True, mask_landmarks=True)
    if make.device != "cpu":  # as many tiles as fill a GPU, of wide heads
        for filled, running in (([2_000, 9, 300], [900, 1, 300]), ([5_000], [4_000])):
            paged = make.paged(filled, 16, 64, 128, dtype=torch.bfloat16)
            row, slot, _ = paged.queries(running)
            q = make.randn(len(row), 32, 128, dtype=torch.bfloat16)
            given = (q, paged.k_cache, paged.v_cache, row, slot, paged.page_table, 512)
            yield make.args(*given, aligned=True, mask_landmarks=True, dtype=torch.bfloat16)
            yield make.args(*given, chunked=True)
        for form in make.kv_formats:
            bytes_of = paged.quantized(form)
            caches = (bytes_of.k_cache, bytes_of.v_cache)
            for count in (900, 7):
                where = (row[:count], slot[:count], paged.page_table)
                yield make.args(q[:count], *caches, *where, 512, aligned=True, mask_landmarks=True)
