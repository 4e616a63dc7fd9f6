"""Repetition, presence and frequency penalties."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.registry import op
from cairn.ops.testing import Cases, Make


@op(mutates=("logits",))
def apply_penalties(
    logits: Tensor,
    prompt_mask: Tensor,
    output_counts: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
) -> None:
    """Penalise logits in place, with vLLM's semantics and order.

    First repetition (Keskar et al. 2019, section 4.1): tokens of the prompt or the output have
    positive logits divided, others multiplied by it. Then, over the output alone,
    logit -= frequency * count + presence * (count > 0), as in OpenAI's API.

    Args:
        logits: [B, V] float32.
        prompt_mask: [B, V] bool, tokens of the prompt.
        output_counts: [B, V] int32, how often each token was generated.
        presence, frequency: [B] float32; 0 does nothing.
        repetition: [B] float32 > 0; 1 does nothing.
    """
    generated = output_counts > 0
    factor = torch.where(prompt_mask | generated, repetition[:, None], 1.0)
    logits.copy_(torch.where(logits > 0, logits / factor, logits * factor))
    logits.sub_(frequency[:, None] * output_counts)
    logits.sub_(presence[:, None] * generated)


@apply_penalties.cases
def _(make: Make) -> Cases:
    for rows, vocabulary in ((1, 5), (4, 301), (0, 7)):
        yield make.args(
            make.randn(rows, vocabulary, scale=3.0),
            make.randint(0, 2, rows, vocabulary).bool(),
            make.randint(0, 3, rows, vocabulary, dtype=torch.int32),
            make.randn(rows),
            make.randn(rows),
            make.rand(rows) + 0.5,
        )
    hidden = make.tensor([[float("-inf"), 1.0, -1.0]])
    counts, one = make.tensor([[2, 1, 0]], dtype=torch.int32), make.full((1,), 1.0)
    yield make.args(hidden, make.full((1, 3), 1, dtype=torch.bool), counts, one, one, one * 2)
