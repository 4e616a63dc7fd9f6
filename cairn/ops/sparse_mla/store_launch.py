"""Launches of the writes to this family's caches."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.quantization.codes import E4M3
from cairn.ops.sparse_mla import index_cache, records
from cairn.ops.sparse_mla.kernels.store import (
    index_query_kernel,
    index_store_kernel,
    record_store_kernel,
)
from cairn.ops.sparse_mla.score_launch import words_fit
from cairn.ops.sparse_mla.tuning import TUNING

ROTATED = 16
"""Rows per program when they are multiplied by the Hadamard matrix."""


def fits_index(k: Tensor, cache: Tensor, location: Tensor) -> bool:
    """Whether the kernel can take these keys, cache and locations."""
    words = not index_cache.is_quantized(cache) or words_fit(cache, k.shape[1])
    return words and k.stride(1) == 1 and cache.is_contiguous() and location.is_contiguous()


def store_index(
    k: Tensor, cache: Tensor, location: Tensor, preshuffled: bool, power: bool, hadamard: bool
) -> None:
    """Write k [T, D] to locations [T] of the cache; see `index_store_kernel`."""
    tokens, dim = k.shape
    size = index_cache.page_size(cache, dim)
    if not tokens or not cache.numel():
        return
    scales = None
    if index_cache.is_quantized(cache):
        scales = cache.view(torch.float32)[:, size * dim // 4 :]
    rows = ROTATED if hadamard else TUNING.store_tokens
    index_store_kernel[(-(-tokens // rows),)](
        k,
        cache=cache,
        scales=scales,
        location=location,
        tokens=tokens,
        capacity=len(cache) * size,
        k_token=k.stride(0),
        page_stride=cache.stride(0),
        scale_stride=0 if scales is None else scales.stride(0),
        DIM=dim,
        DP=gpu.next_power_of_2(dim),
        SIZE=size,
        TOKENS=rows,
        PRESHUFFLED=preshuffled,
        POWER=power,
        HADAMARD=hadamard,
        HARDWARE=gpu.supports_e4m3(k.device),
        num_warps=4 if hadamard else 1,
    )


def quantize_queries(q: Tensor, weights: Tensor, hadamard: bool) -> tuple[Tensor, Tensor]:
    """(codes [T, Hi, D] e4m3, weights [T, Hi] times the scales) of contiguous queries."""
    tokens, heads, dim = q.shape
    codes = gpu.empty(q.shape, torch.uint8, q.device)
    scaled = gpu.empty(weights.shape, torch.float32, q.device)
    rows = tokens * heads
    if rows:
        block = ROTATED if hadamard else TUNING.store_tokens
        index_query_kernel[(-(-rows // block),)](
            q,
            weights,
            codes,
            scaled,
            rows,
            DIM=dim,
            DP=gpu.next_power_of_2(dim),
            ROWS=block,
            HADAMARD=hadamard,
            HARDWARE=gpu.supports_e4m3(q.device),
            num_warps=4 if hadamard else 1,
        )
    return codes.view(E4M3), scaled


def fits_records(latent: Tensor, k_pe: Tensor, cache: Tensor, location: Tensor) -> bool:
    """Whether the kernel can take these latents, rotary keys, cache and locations."""
    near = latent.stride(1) == 1 and k_pe.stride(1) == 1 and location.is_contiguous()
    if not records.is_quantized(cache):
        return near
    places = (*cache.stride()[:2], cache.storage_offset())
    return near and all(n % 4 == 0 for n in places) and k_pe.shape[1] % 2 == 0


def store_records(latent: Tensor, k_pe: Tensor, cache: Tensor, location: Tensor) -> None:
    """Write latents [T, r] and rotary keys [T, dr]; see `record_store_kernel`."""
    (tokens, width), (pages, size, _) = latent.shape, cache.shape
    if not tokens or not pages:
        return
    quantized = records.is_quantized(cache)
    scales = cache.view(torch.float32) if quantized else None
    ropes = cache.view(torch.bfloat16) if quantized else None
    record_store_kernel[(tokens,)](
        latent,
        k_pe=k_pe,
        cache=cache,
        scales=scales,
        ropes=ropes,
        location=location,
        tokens=tokens,
        capacity=pages * size,
        latent_token=latent.stride(0),
        pe_token=k_pe.stride(0),
        page_stride=cache.stride(0),
        slot_stride=cache.stride(1),
        LATENT=width,
        LP=gpu.next_power_of_2(width),
        ROPE=k_pe.shape[1],
        RP=gpu.next_power_of_2(k_pe.shape[1]),
        SIZE=size,
        TILE=records.WHOLE_TILE if width % records.TILE else records.TILE,
        HARDWARE=gpu.supports_e4m3(latent.device),
        num_warps=1,
    )
