"""The reference model's logits, position by position, through the whole engine."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.engine.harness import CASES, difference, engine, greedy, lengths, run, vectors

CASE_LENGTHS = [(case, n) for case in CASES for n in lengths(case)]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("case", "length"), CASE_LENGTHS)
def test_prefill_and_greedy_continuation(case: str, length: int, device: str):
    golden = {
        name.split(".", 1)[1]: value
        for name, value in vectors(case).items()
        if name.startswith(f"n{length}.")
    }
    tokens = golden["greedy_ids"].tolist()
    built = engine(case, chunked_prefill_size=64, device=device)
    (got,) = run(built, [golden["input_ids"].tolist()], greedy(len(tokens), prompt_logprobs=True))

    scale = golden["prefill_logits"].abs().max().item()
    prefill = torch.log_softmax(golden["prefill_logits"], -1).numpy()
    decode = torch.log_softmax(golden["decode_logits"], -1).numpy()
    assert got.tokens == tokens
    assert difference(got.prompt_logprobs, prefill[:-1]) < 2e-4 * scale
    assert difference(got.logprobs, decode) < 2e-4 * scale
    assert np.isfinite(got.logprobs).all()
    assert built.core.cache.num_free + built.core.cache.num_evictable == built.memory.num_pages
