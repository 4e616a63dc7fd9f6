"""What the three filters of probabilities share."""

from __future__ import annotations

import torch
from torch import Tensor


def renormalised(probs: Tensor, keep: Tensor) -> Tensor:
    """Kept probabilities divided by their sum per row, others 0. probs [B, V] float32, keep bool.

    A row without mass stays zero.
    """
    kept = torch.where(keep, probs, 0.0)
    mass = kept.sum(dim=-1, keepdim=True)
    return kept.div_(mass.clamp_min(torch.finfo(mass.dtype).tiny))
