"""Texts of which rounding alone chooses the pages."""

from __future__ import annotations

import torch
from hypothesis import assume

from cairn.engine.build import Built
from tests.engine.harness import Trace, difference
from tests.failures.oracle import oracle

CLOSE = {"cpu": 1e-5, "cuda": 2e-4}
"""Scores of pages that lie so near each other may take either order by any rounding."""


def leave_out_ties(a: Trace, b: Trace, prompt: list[int], built: Built, rounding: float) -> None:
    """End an example of hypothesis whose answers differ by more than rounding, if a query's last
    page taken and first one left score alike."""
    if difference(a.logprobs, b.logprobs) >= rounding:
        _, batch = oracle(built, prompt + a.tokens)
        assume(batch.margin >= CLOSE[torch.device(built.config.device).type])
