"""Scores of the lightning indexer (DeepSeek-V3.2 report, equation 1)."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.checks import FLOAT32, FLOATS, expect, refuse
from cairn.ops.quantization.codes import E4M3
from cairn.ops.registry import Tolerance

ALIGNED = 64
"""The row stride of score tensors is a multiple of this, for vectorised loads and stores."""
TOLERANCES: dict[torch.dtype, Tolerance] = {
    torch.float32: (1e-4, 1e-4),
    torch.bfloat16: (1e-3, 1e-3),
    E4M3: (1e-3, 1e-2),
}
REASON = (
    "a sum over heads of products in another order, whose terms have either sign; Hopper's tensor "
    "cores keep 14 bits of a sum of products in float8"
)


def check_queries(op: str, q: Tensor, weights: Tensor) -> tuple[int, int, int]:
    """Raise BadArgument unless q is [T, Hi, D] and weights [T, Hi] float32. Returns (T, Hi, D)."""
    expect(op, "q", q, 3, (*FLOATS, E4M3))
    tokens, heads, dim = q.shape
    if not heads or not dim:
        refuse(op, "q", f"has shape {list(q.shape)}, not [any, n, n] with n > 0")
    expect(op, "weights", weights, (tokens, heads), FLOAT32, q)
    return tokens, heads, dim


def unscored(tokens: int, width: int, device: torch.device) -> Tensor:
    """Uninitialised scores [tokens, width] float32 with an aligned row stride."""
    wide = -(-width // ALIGNED) * ALIGNED
    return gpu.empty((tokens, wide), torch.float32, device)[:, :width]


def bytes_of_query(heads: int, blocks: int, size: int, dim: int) -> int:
    """Bytes that `score_keys` allocates per query: its keys, their scores, copies of q."""
    return 4 * blocks * (size * (heads + dim) + heads * dim)


def score_keys(q: Tensor, weights: Tensor, k: Tensor, scale: Tensor | None) -> Tensor:
    """scale_s * sum_h weights_h * max(0, q_h . k_s) for every key, in float32.

    Blocks of keys are multiplied one by one: a library's rounding depends on the width of the
    product, and a token's scores must not depend on how many keys other tokens have.

    Args:
        q: [n, Hi, D].
        weights: [n, Hi] float32.
        k: [n, blocks, S, D], each query's own, or [1, blocks, S, D]; a NaN key affects its own
            score only.
        scale: [n, blocks, S] or [1, blocks, S] float32; None: 1.
    Returns:
        [n, blocks * S] float32.
    """
    dots = torch.matmul(q.float().unsqueeze(1), k.float().transpose(-1, -2)).relu_()
    scores = dots.mul_(weights[:, None, :, None]).sum(dim=2)
    return (scores if scale is None else scores.mul_(scale)).flatten(1)
