"""Activations of feed-forward layers.

They are importable from `cairn.ops.activation` too, as from FlashInfer's module `activation`.
"""

from cairn.ops.activation.gelu_and_mul import gelu_and_mul
from cairn.ops.activation.gelu_tanh_and_mul import gelu_tanh_and_mul
from cairn.ops.activation.silu_and_mul import silu_and_mul

__all__ = ["gelu_and_mul", "gelu_tanh_and_mul", "silu_and_mul"]
