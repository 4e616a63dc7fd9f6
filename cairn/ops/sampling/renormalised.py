"""What the three filters of probabilities share."""

from __future__ import annotations

import torch
from torch import Tensor


def renormalised(probs: Tensor, keep: Tensor) -> Tensor:
    """Kept probabilities divided by their sum per row, others 0. probs [B, V] float32, keep bool.

    A row without mass stays zero.
    """
    kept = torch.where(keep, probs, 0.0)
    # On a CPU, torch divides the sum of a single row over threads, which rounds differently than a
    # row of a batch: sum two copies.
    beside = kept if len(kept) > 1 else kept.expand(2 * len(kept), -1)
    mass = beside.sum(dim=-1, keepdim=True)[: len(kept)]
    return kept.div_(mass.clamp_min(torch.finfo(mass.dtype).tiny))
