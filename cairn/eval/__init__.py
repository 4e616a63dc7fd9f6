"""Evaluations: needles, RULER, loss over context length, and parity of logits."""
