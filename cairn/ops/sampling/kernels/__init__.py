"""Kernels of the sampling ops: what finds thresholds, what draws, what changes logits."""
