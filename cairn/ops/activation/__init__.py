"""Activations of feed-forward layers.

What FlashInfer has of this in its module `activation` is in `cairn.ops.activation` too.
"""

from cairn.ops.activation.gelu_and_mul import gelu_and_mul
from cairn.ops.activation.gelu_tanh_and_mul import gelu_tanh_and_mul
from cairn.ops.activation.silu_and_mul import silu_and_mul

__all__ = ["gelu_and_mul", "gelu_tanh_and_mul", "silu_and_mul"]
