"""Numba loops from a fused QKV projection to queries, and to keys and values in the cache."""

from __future__ import annotations

import math

import numpy as np

from cairn.ops.cpu import jit, narrow, prange, wide
from cairn.ops.cpu.avx512 import LANES, load, spread, store_rounded, total, widened


@jit(threads=True)
def heads_into_cache(
    projected, added, weight, cos_sin, k_cache, v_cache, location, eps, whole, q, z
):
    """The op heads_into_cache on arrays, one token at a time.

    Args:
        projected: [T, W]; added: [T, h_q d] or [0, 0]; weight: [H, d]; cos_sin: [T, d] or [0, 0].
        k_cache, v_cache: [pages, h_kv, S, d], changed; location: [T] int64.
        eps, whole: of the norms.
        q: [T, h_q, d] and z: [T, h_q or 0, d], written.
    """
    own, others = q.shape[1], k_cache.shape[1]
    # Values follow q and k in `projected`; with `added`, z is computed and has no columns there.
    behind = own + others if added.size else len(weight)
    for token in prange(len(projected)):
        given = projected[token]
        y = _normed(given, added[token : token + 1], weight, own, others, eps, whole)
        if cos_sin.size:
            _rotate(y, cos_sin[token])
        _store(y[:own], q[token])
        _store(y[own + others :], z[token])
        at = location[token]
        if at >= 0:
            _keep(y[own : own + others], given, behind * weight.shape[1], k_cache, v_cache, at)


@jit
def _normed(given, added, weight, own, others, eps, whole):
    """The heads of q, k and z [H, d] of a token in float32, normed."""
    heads, dim = weight.shape
    y = np.empty((heads, dim), np.float32)
    mean = np.empty(heads, np.float32)
    behind = heads - own if added.size else heads
    for h in range(heads):
        line, square = y[h], np.float32(0)
        if h < behind:
            part = given[h * dim : (h + 1) * dim]
            for i in range(dim):
                line[i] = wide(part[i])
        else:
            part = given[(h - behind) * dim : (h - behind + 1) * dim]
            more = added[0, (h - behind) * dim : (h - behind + 1) * dim]
            for i in range(dim):
                line[i] = wide(narrow(wide(more[i]) + wide(part[i]), part[i]))
        for i in range(dim):
            square += line[i] * line[i]
        mean[h] = square / np.float32(dim)
    if whole:
        for begin, end in ((0, own), (own, own + others), (own + others, heads)):
            means = np.float32(0)
            for h in range(begin, end):
                means += mean[h]
            for h in range(begin, end):
                mean[h] = means / np.float32(end - begin)
    for h in range(heads):
        line, scale = y[h], weight[h]
        factor = np.float32(1) / np.float32(math.sqrt(mean[h] + eps))
        for i in range(dim):
            line[i] = line[i] * factor * wide(scale[i])
    return y


@jit
def _rotate(y, cos_sin):
    """Rotate every head of y [H, d] in place by a token's [cos | sin]."""
    half = y.shape[1] // 2
    cos, sin = cos_sin[:half], cos_sin[half:]
    for h in range(len(y)):
        left, right = y[h, :half], y[h, half:]
        for i in range(half):
            a, b = left[i], right[i]
            left[i] = a * cos[i] - b * sin[i]
            right[i] = b * cos[i] + a * sin[i]


@jit
def _store(y, out):
    """Write heads y [n, d] to `out`, rounded to its dtype."""
    for h in range(len(y)):
        line, target = y[h], out[h]
        for i in range(len(line)):
            target[i] = narrow(line[i], target[i])


@jit
def _keep(y, given, first, k_cache, v_cache, at):
    """Write the keys y [h_kv, d], and the values that begin at column `first` of the projection, to
    the cache."""
    heads, dim = y.shape
    page, place = at // k_cache.shape[2], at % k_cache.shape[2]
    for h in range(heads):
        key, line = k_cache[page, h, place], y[h]
        value, own = v_cache[page, h, place], given[first + h * dim : first + (h + 1) * dim]
        for i in range(dim):
            key[i] = narrow(line[i], key[i])
            value[i] = own[i]


@jit(threads=True)
def heads_in_lanes(projected, weight, cos_sin, k_cache, v_cache, location, eps, q, z):
    """`heads_into_cache` by AVX-512 for bfloat16, 16 elements at once; without `added`, each head
    normed by itself.

    d / 2 is a multiple of 16.
    """
    heads, dim = weight.shape
    own, others, size = q.shape[1], k_cache.shape[1], k_cache.shape[2]
    for token in prange(len(projected)):
        given, angles, at = token * projected.shape[1], token * dim, location[token]
        for h in range(own):
            to = (token * own + h) * dim
            _head_in_lanes(projected, given, weight, h * dim, cos_sin, angles, eps, q, to)
        for h in range(z.shape[1]):
            first, to = (own + others + h) * dim, (token * z.shape[1] + h) * dim
            _head_in_lanes(projected, given, weight, first, cos_sin, angles, eps, z, to)
        if at < 0:
            continue
        page, place = at // size, at % size
        for h in range(others):
            first, to = (own + h) * dim, ((page * others + h) * size + place) * dim
            _head_in_lanes(projected, given, weight, first, cos_sin, angles, eps, k_cache, to)
            value, line = projected[token], v_cache[page, h, place]
            for i in range(dim):
                line[i] = value[(heads + h) * dim + i]


@jit
def _head_in_lanes(projected, token, weight, first, cos_sin, angles, eps, out, to):
    """Norm and rotate one head of a token, which begins at column `first` of the projection.

    Args:
        token, angles, to: flat offsets of the token's row, of its [cos | sin], and of the head in
            out.
    """
    dim, at = weight.shape[1], token + first
    half = dim // 2
    square = spread(np.float32(0))
    for i in range(0, dim, LANES):
        x = widened(projected, at + i)
        square = square + x * x
    mean = total(square) / np.float32(dim)
    factor = spread(np.float32(1) / np.float32(math.sqrt(mean + eps)))
    for i in range(0, half, LANES):
        a = widened(projected, at + i) * factor * widened(weight, first + i)
        b = widened(projected, at + half + i) * factor * widened(weight, first + half + i)
        if cos_sin.size:
            cos, sin = load(cos_sin, angles + i), load(cos_sin, angles + half + i)
            a, b = a * cos - b * sin, b * cos + a * sin
        store_rounded(out, to + i, a)
        store_rounded(out, to + half + i, b)
