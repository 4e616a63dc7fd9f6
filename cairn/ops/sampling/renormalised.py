"""Renormalisation of filtered probabilities."""

from __future__ import annotations

import torch
from torch import Tensor


def renormalised(probs: Tensor, keep: Tensor) -> Tensor:
    """Divide the kept probabilities of each row by their sum, and set the others to 0.

    probs [B, V] float32, keep [B, V] bool. A row whose sum is 0 stays 0.
    """
    kept = torch.where(keep, probs, 0.0)
    # On a CPU, torch splits the sum of a single row over threads, which rounds differently from a
    # row of a batch. Two copies of the row avoid that.
    copies = kept if len(kept) > 1 else kept.expand(2 * len(kept), -1)
    mass = copies.sum(dim=-1, keepdim=True)[: len(kept)]
    return kept.div_(mass.clamp_min(torch.finfo(mass.dtype).tiny))
