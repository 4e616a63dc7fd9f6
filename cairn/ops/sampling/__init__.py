"""From logits to tokens: penalties, filters of probabilities, the draw.

The functions of FlashInfer's and sgl-kernel's modules `sampling` are importable from
`cairn.ops.sampling` too.
"""

from cairn.ops.sampling.min_p_renorm_probs import min_p_renorm_probs
from cairn.ops.sampling.samplers import (
    min_p_sampling_from_probs,
    sampling_from_probs,
    top_k_top_p_sampling_from_probs,
    top_p_sampling_from_probs,
)
from cairn.ops.sampling.top_k_mask_logits import top_k_mask_logits
from cairn.ops.sampling.top_k_renorm_probs import top_k_renorm_prob, top_k_renorm_probs
from cairn.ops.sampling.top_k_top_p_sampling_from_logits import top_k_top_p_sampling_from_logits
from cairn.ops.sampling.top_p_renorm_probs import top_p_renorm_prob, top_p_renorm_probs

__all__ = [
    "min_p_renorm_probs",
    "min_p_sampling_from_probs",
    "sampling_from_probs",
    "top_k_mask_logits",
    "top_k_renorm_prob",
    "top_k_renorm_probs",
    "top_k_top_p_sampling_from_logits",
    "top_k_top_p_sampling_from_probs",
    "top_p_renorm_prob",
    "top_p_renorm_probs",
    "top_p_sampling_from_probs",
]
