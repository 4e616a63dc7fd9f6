"""Logits of the reference model, position by position, through the whole engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from cairn.config import default_model_path
from tests.engine.harness import CASES, Trace, difference, engine, greedy, lengths, run, vectors
from tests.support import shows

TRAINED = Path(__file__).parents[1] / "data" / "goldens" / "cairn-7m"


def golden_of(case: str, length: int) -> dict[str, torch.Tensor]:
    return {
        name.split(".", 1)[1]: value
        for name, value in vectors(case).items()
        if name.startswith(f"n{length}.")
    }


def logprobs(logits: torch.Tensor) -> np.ndarray:
    return torch.log_softmax(logits.float(), -1).numpy()


def prompt_rows(trace: Trace) -> np.ndarray:
    """Log-probabilities after each prompt token."""
    return np.concatenate([trace.prompt_logprobs, trace.logprobs[:1]])


@shows("hils", "reference logits")
@pytest.mark.parametrize("case", CASES)
def test_prefill_and_greedy_continuation(case: str, device: str):
    """Prompts of all lengths in one batch; one by one on a GPU, where rounding depends on the
    batch."""
    built = engine(case, chunked_prefill_size=64, device=device, enable_prefix_caching=False)
    goldens = [golden_of(case, length) for length in lengths(case)]
    for batch in [goldens] if device == "cpu" else [[golden] for golden in goldens]:
        prompts = [golden["input_ids"].tolist() for golden in batch]
        params = [greedy(len(golden["greedy_ids"]), prompt_logprobs=True) for golden in batch]
        for golden, got in zip(batch, run(built, prompts, params), strict=True):
            assert_golden(got, golden)
    assert built.core.cache.num_free == built.memory.num_pages


def assert_golden(got: Trace, golden: dict[str, torch.Tensor]) -> None:
    scale = golden["prefill_logits"].abs().max().item()
    prefill, decode = (logprobs(golden[f"{name}_logits"]) for name in ("prefill", "decode"))
    assert got.tokens == golden["greedy_ids"].tolist(), len(prefill)
    assert difference(got.prompt_logprobs, prefill[:-1]) < 2e-4 * scale, len(prefill)
    assert difference(got.logprobs, decode) < 2e-4 * scale, len(prefill)
    assert np.isfinite(got.logprobs).all()


@pytest.mark.parametrize("case", CASES)
def test_prefill_in_bfloat16(case: str, device: str):
    """Rounding changes pages at the edge of a selection, so a few rows with random weights
    differ."""
    golden = golden_of(case, max(lengths(case)))
    built = engine(case, dtype="bfloat16", device=device)
    (got,) = run(built, [golden["input_ids"].tolist()], greedy(1, prompt_logprobs=True))
    error = np.abs(prompt_rows(got) - logprobs(golden["prefill_logits"])).max(-1)
    scale = golden["prefill_logits"].abs().max().item()
    median, most = (np.quantile(error, part) / scale for part in (0.5, 0.9))
    print(f"{case} {device}: half of the rows within {median:.1e}, nine tenths {most:.1e}")
    assert median < 5e-2
    assert most < 0.2


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_trained_model(dtype: str, device: str):
    golden = load_file(TRAINED / "vectors.safetensors")
    built = engine(str(default_model_path()), dtype=dtype, device=device, kv_cache_memory="64MiB")
    prompt = golden["input_ids"].tolist()
    (got,) = run(built, [prompt], greedy(1, prompt_logprobs=True), budgets=[700])
    rows, tail = prompt_rows(got), logprobs(golden["logits_tail"])
    error = np.abs(rows[-len(tail) :] - tail)
    same = (rows.argmax(-1) == golden["argmax"].numpy()).mean()
    print(f"{dtype} {device}: error {error.max():.1e}, {same:.4f} of the tokens")
    if dtype == "float32":
        assert error.max() < 2e-3
        assert same > 0.999
    else:
        assert np.median(error) < 0.1
        assert same > 0.97
