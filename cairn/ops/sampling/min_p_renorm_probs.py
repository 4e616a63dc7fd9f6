"""Min-p filter of probabilities (Nguyen et al. 2024, section 3)."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.registry import op
from cairn.ops.sampling import arguments, launch
from cairn.ops.sampling.renormalised import renormalised


@op
def min_p_renorm_probs(probs: Tensor, min_p: Tensor) -> Tensor:
    """Keep tokens with probs >= min_p * (largest of the row) and divide by their sum.

    Args:
        probs: [B, V] float32, finite and not negative.
        min_p: [B] float32 in [0, 1]; 0 keeps all.
    Returns:
        [B, V] float32.
    """
    threshold = probs.amax(dim=-1, keepdim=True) * min_p[:, None]
    return renormalised(probs, probs >= threshold)


@min_p_renorm_probs.check
def _(call: Call) -> None:
    name = "min_p_renorm_probs"
    arguments.check_rows(name, "probs", call.probs, (torch.float32,))
    arguments.check_parameter(name, "min_p", call.min_p, call.probs, (torch.float32,))


@min_p_renorm_probs.implementation("triton", devices=gpu.DEVICES, when=launch.takes, replayed=True)
def _(call: Call) -> Tensor:
    return launch.filter_probs(call.probs, launch.Filters(min_p=call.min_p))
