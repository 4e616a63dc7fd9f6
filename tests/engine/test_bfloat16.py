"""bfloat16 on the CPU, in steps of any size, compared with float32."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from cairn import LLM, SamplingParams
from tests.engine.harness import dense

TEXT = Path(__file__).parents[2] / "LICENSE"
"""An English text. bfloat16 changes none of its greedy tokens: in steps of 38 sizes the divergence
was at most 0.0074."""

TOKENS = 1461
"""More pages than are selected. The model is certain of the following tokens: each is 5 nats ahead
of the next likeliest."""


@functools.cache
def likely(dtype: str, step: int) -> tuple[Tensor, list[int]]:
    """Log-probabilities [TOKENS - 1, V] of the embedded model, and its next tokens."""
    llm = LLM(dtype=dtype, chunked_prefill_size=step, max_num_seqs=1, max_model_len=4000)
    ids = list(TEXT.read_bytes()[:TOKENS])
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=-1)
    [result] = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    rows = result.prompt_logprobs[1:]
    return torch.tensor(np.array([dense(row, 256) for row in rows])), result.outputs[0].token_ids


@pytest.mark.parametrize("step", [64, pytest.param(4096, marks=pytest.mark.slow)])
def test_steps_of_any_size_agree_with_float32(step: int) -> None:
    exact, said = likely("float32", 1024)
    found, also_said = likely("bfloat16", step)
    assert len(exact) == TOKENS - 1
    divergence = (exact.exp() * (exact - found)).sum(dim=-1)
    assert divergence.mean() < 3e-4
    assert divergence.max() < 0.03
    assert (exact.argmax(-1) == found.argmax(-1)).float().mean() > 0.99
    assert also_said == said
