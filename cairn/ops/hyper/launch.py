"""Launches of the hyper-connection kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.hyper.kernels import gather_kernel, post_kernel, products_kernel
from cairn.ops.pdl import pdl_option, uses_pdl

TOKENS, COLUMNS, BLOCK = 16, 64, 1024
"""Tokens, and elements per iteration, of a program of `products_kernel`; elements per program of
the other kernels."""
PROGRAMS, SPLITS = 256, 32
"""Wanted number of programs of `products_kernel`, and most splits to reach it."""
WARPS = 4


def fits(streams: Tensor, *others: Tensor) -> bool:
    """Whether the streams [T, n, h] of a token, and the other tensors, are contiguous."""
    near = streams.stride(2) == 1 and streams.stride(1) == streams.shape[2]
    return near and all(x.is_contiguous() for x in others)


def gather(
    streams: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    eps: tuple[float, float],
    iterations: int = 0,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The results of `mhc_pre`, or with iterations = 0 of `mhc_head`; eps: (norm_eps, eps) of these
    ops."""
    tokens, count, hidden = streams.shape
    device, rows, width = streams.device, fn.shape[0], count * hidden
    x = gpu.empty((tokens, hidden), streams.dtype, device)
    post = mix = None
    if iterations:
        post = gpu.empty((tokens, count), torch.float32, device)
        mix = gpu.empty((tokens, count, count), torch.float32, device)
    if not tokens:
        return x, post, mix
    padded, blocks = max(16, gpu.next_power_of_2(rows + 1)), -(-tokens // TOKENS)
    wanted = max(1, min(-(-PROGRAMS // blocks), SPLITS, -(-width // COLUMNS)))
    # Rounded to a power of two, so that few variants are compiled.
    span = COLUMNS * gpu.next_power_of_2(-(-width // (wanted * COLUMNS)))
    splits = -(-width // span)
    part = gpu.empty((splits, tokens, padded), torch.float32, device)
    products_kernel[(blocks, splits)](
        streams=streams,
        fn=fn,
        part=part,
        tokens=tokens,
        width=width,
        stride=streams.stride(0),
        ROWS=rows,
        NP=padded,
        BT=TOKENS,
        BK=COLUMNS,
        SPAN=span,
        PRECISION="ieee",
        num_warps=WARPS,
    )
    block = min(BLOCK, gpu.next_power_of_2(hidden))
    parts = -(-hidden // block)
    gather_kernel[(tokens * parts,)](
        streams=streams,
        part=part,
        scale=scale,
        base=base,
        x=x,
        post=post,
        mix=mix,
        tokens=tokens,
        splits=splits,
        hidden=hidden,
        stride=streams.stride(0),
        norm_eps=eps[0],
        eps=eps[1],
        iterations=iterations,
        COUNT=count,
        CP=gpu.next_power_of_2(count),
        ROWS=rows,
        NP=padded,
        SP=gpu.next_power_of_2(splits),
        BLOCK=block,
        PARTS=parts,
        num_warps=WARPS,
    )
    return x, post, mix


def enter(streams: Tensor, delta: Tensor, post: Tensor, mix: Tensor) -> None:
    """`mhc_post`."""
    tokens, count, hidden = streams.shape
    if not tokens:
        return
    block = min(BLOCK, gpu.next_power_of_2(hidden))
    parts = -(-hidden // block)
    pdl = uses_pdl(streams.device, tokens, parts * WARPS)
    post_kernel[(tokens * parts,)](
        streams=streams,
        delta=delta,
        post=post,
        mix=mix,
        hidden=hidden,
        stride=streams.stride(0),
        delta_stride=delta.stride(0),
        COUNT=count,
        CP=gpu.next_power_of_2(count),
        BLOCK=block,
        PARTS=parts,
        PDL=pdl,
        num_warps=WARPS,
        **pdl_option(pdl),
    )
