"""Differentiable attention of whole sequences: the op that training adds to `cairn.ops`."""

from cairn.train.sequence.sequence_attention import sequence_attention

__all__ = ["sequence_attention"]
