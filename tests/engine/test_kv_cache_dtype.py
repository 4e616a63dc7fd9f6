"""Keys and values in 8 and 4 bits through the whole engine: the same invariances, coarser
values."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from cairn.ops.cache.quantized import is_quantized
from tests.engine.harness import difference, engine, greedy, run, vectors
from tests.support import shows

FP4 = "fp4_e2m1"
CASES = [
    "qwen_gqa4_prior_lora_inrange",  # a summary by a prior query
    "qwen_noprior_lmk_k",  # the landmark's own key is the summary
    "qwen_meanpool_nolmk",  # the mean of the keys
    "olmo_mha_interleave4",  # plain window layers among them
]


def prompt(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(90) for _ in range(count)]


def assert_near(got: np.ndarray, want: np.ndarray) -> None:
    """Log-probabilities [rows, V] agree. Float32 rounding can move a key to the next 8-bit or 4-bit
    value, which changes the rows that attend to it."""
    assert difference(got, want) < 0.5
    assert np.median(np.abs(got - want).max(-1)) < 0.02


@shows("hils", "quantised KV")
@pytest.mark.parametrize(
    ("case", "kind"),
    [
        *((case, "fp8_e4m3") for case in CASES[:3]),
        pytest.param(CASES[3], "fp8_e4m3", marks=pytest.mark.slow),
        (CASES[0], FP4),
    ],
)
def test_chunks_batches_prefixes_and_decode_agree(case, kind):
    """A prompt at once; in chunks beside another; from the prefix cache; and token by token.

    On the CPU, whose products round alike however many rows they have: a GPU's noise carries so
    many keys over a border that random weights show it everywhere.
    """
    tokens = prompt(1, 130)

    def fresh():
        return engine(case, kv_cache_dtype=kind, max_num_seqs=4)

    (want,) = run(fresh(), [tokens], greedy(20, prompt_logprobs=True))
    built = fresh()
    assert all(is_quantized(layer["k"]) for layer in built.runner.pools.pages)
    got, _ = run(built, [tokens, prompt(2, 90)], greedy(20, prompt_logprobs=True), [7, 31, 16])
    assert_near(got.prompt_logprobs, want.prompt_logprobs)
    (again,) = run(built, [tokens], greedy(1))
    assert again.cached > 100
    # It reads what the chunks have written. A single row cannot show rounding differences, but its
    # keys are equal.
    assert_near(again.logprobs, got.logprobs[:1])
    (whole,) = run(fresh(), [tokens + want.tokens[:-1]], greedy(1, prompt_logprobs=True))
    assert_near(whole.prompt_logprobs[-19:], want.logprobs[:-1])


@pytest.mark.parametrize(
    ("case", "kind", "most"), [*((c, "fp8_e4m3", 0.15) for c in CASES), (CASES[0], FP4, 1.0)]
)
def test_quantised_caches_are_near_the_reference(case, kind, most, device):
    golden = vectors(case)
    length = max(int(name.split(".")[0][1:]) for name in golden if "input_ids" in name)
    tokens = golden[f"n{length}.input_ids"].tolist()
    want = torch.log_softmax(golden[f"n{length}.prefill_logits"], -1).numpy()[:-1]
    built = engine(case, device=device, kv_cache_dtype=kind)
    (got,) = run(built, [tokens], greedy(1, prompt_logprobs=True))
    divergence = (np.exp(want) * (want - got.prompt_logprobs)).sum(-1)
    # Random weights magnify the error of a few bits; a wrong value would have a far larger effect.
    assert 0 < divergence.mean() < most and np.isfinite(got.prompt_logprobs).all()


def test_bytes_are_half_or_a_quarter_of_bfloat16_and_a_little_more():
    half = engine(CASES[0], dtype="bfloat16", kv_cache_dtype="bf16").memory.bytes_per_page
    small = engine(CASES[0], dtype="bfloat16", kv_cache_dtype="fp8_e4m3").memory.bytes_per_page
    least = engine(CASES[0], dtype="bfloat16", kv_cache_dtype=FP4).memory.bytes_per_page
    assert 0.5 < small / half < 0.7 and 0.28 < least / half < 0.5
