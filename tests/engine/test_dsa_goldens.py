"""Sparse attention with an indexer, compared with the reference implementation, through the engine.

Physical pages come in random order, and what nobody owns of them is NaN. What the reference says is
compared at every position: logits, greedy tokens, the sets of selected tokens, which are equal; and
where it says them, scores of the indexer and outputs of attention.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from cairn.engine.build import Built
from tests.engine.dsa import CASES, GOLDENS, Seen, golden, watched
from tests.engine.harness import Trace, engine, greedy, run
from tests.support import shows

BOUND = 1e-4
"""Relative to the largest magnitude of the compared values."""
CASE_LENGTHS = [(case, n) for case in CASES for n in sorted(golden(GOLDENS / case))]
LONGER = [(case, n) for case, n in CASE_LENGTHS if n > 64]


def shuffled(case: str, **options) -> Built:
    """An engine that allocates pages in random order."""
    built = engine(str(GOLDENS / case), kv_cache_memory="1MiB", **options)
    allocator = built.core.cache.allocator
    pages = allocator.take(allocator.num_free)
    random.Random(4).shuffle(pages)
    for page in pages:
        allocator.free([page])
    return built


def wanted(expected: dict[str, Tensor], reports_prompt: bool = True):
    """A request with the reference's prompt."""
    return greedy(len(expected["greedy_ids"]), prompt_logprobs=reports_prompt)


def assert_golden(got: Trace, seen: Seen, request: int, expected: dict[str, Tensor]) -> None:
    """Compare the results of a request with the reference, from the first token that it
    computed."""
    row, first, length = seen.rows[request], got.cached, len(expected["input_ids"])
    scale = expected["prefill_logits"].abs().max().item()
    assert got.tokens == expected["greedy_ids"].tolist()
    assert_near(got.logprobs, logprobs(expected["decode_logits"]), scale)
    if len(got.prompt_logprobs):
        assert_near(got.prompt_logprobs, logprobs(expected["prefill_logits"])[:-1], scale)
    selected = expected["selected"]
    topk, steps = selected.shape[-1], len(expected["decode_selected"])
    assert torch.equal(seen.sets(row, range(first, length), topk), selected[:, first:])
    decoding = seen.sets(row, range(length, length + steps), topk).transpose(0, 1)
    assert torch.equal(decoding, expected["decode_selected"])
    if "attn_out" in expected:
        assert_traced(seen, row, first, length, expected)


def assert_traced(
    seen: Seen, row: int, first: int, length: int, expected: dict[str, Tensor]
) -> None:
    """Compare the indexer's scores and the attention outputs of the prompt's last tokens."""
    outputs, scores = expected["attn_out"], expected["index_logits"]
    slots = range(length - outputs.shape[1], length)
    most = scores[scores.isfinite()].abs().max().item()
    compared = 0
    for at, slot in enumerate(slots):
        if slot < first:
            continue
        for layer in range(len(outputs)):
            got = seen.attn_out[layer, row, slot]
            assert_near(got, outputs[layer, at], outputs.abs().max().item())
        for number, layer in enumerate(seen.full):
            got = seen.index_logits.get((layer, row, slot))
            if got is not None:
                assert_near(got, scores[number, at, : slot + 1], most)
                compared += 1
    assert compared


def assert_near(got, expected, scale: float) -> None:
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.shape == expected.shape
    # Written so that NaN fails.
    assert np.abs(got - expected).max() < BOUND * scale


def logprobs(logits: Tensor) -> np.ndarray:
    return torch.log_softmax(logits.float(), -1).numpy()


def serve(built: Built, expected: dict[str, Tensor], budgets=()) -> tuple[Trace, Seen]:
    """A single request."""
    with watched(built) as seen:
        (got,) = run(built, [expected["input_ids"].tolist()], wanted(expected), budgets)
    return got, seen


@shows("deepseek_v32 glm_moe_dsa", "reference logits")
@shows("deepseek_v32", "quantised weights")
@pytest.mark.parametrize(
    ("case", "length"),
    [
        *LONGER,
        *(pytest.param(*one, marks=pytest.mark.slow) for one in CASE_LENGTHS if one not in LONGER),
    ],
)
def test_whole_prompts(case: str, length: int):
    expected = golden(GOLDENS / case)[length]
    got, seen = serve(shuffled(case), expected)
    assert_golden(got, seen, 0, expected)


@pytest.mark.parametrize(
    ("case", "length", "chunk"),
    [
        ("v32_rope_nogroup_tied", 127, 3),
        ("v32_rope_nogroup_tied", 127, 65),
        ("glm_freq4_offset3", 130, 5),
        pytest.param("v32_rope_nogroup_tied", 127, 63, marks=pytest.mark.slow),
        pytest.param("glm_freq4_offset3", 130, 65, marks=pytest.mark.slow),
    ],
)
def test_chunks(case: str, length: int, chunk: int):
    expected = golden(GOLDENS / case)[length]
    got, seen = serve(shuffled(case), expected, [chunk])
    assert_golden(got, seen, 0, expected)


@pytest.mark.parametrize("case", CASES)
def test_all_lengths_together(case: str):
    """A mixed batch of prefills and decodes, in chunks of random sizes."""
    every = list(golden(GOLDENS / case).values())
    built, rng = shuffled(case), random.Random(len(case))
    prompts = [expected["input_ids"].tolist() for expected in every]
    with watched(built) as seen:
        traces = run(
            *(built, prompts, [wanted(expected) for expected in every]),
            budgets=[rng.randint(2, 90) for _ in range(9)],
        )
    for request, (got, expected) in enumerate(zip(traces, every, strict=True)):
        assert_golden(got, seen, request, expected)


@shows("deepseek_v32 glm_moe_dsa", "prefix cache")
@pytest.mark.parametrize(("case", "length"), LONGER)
def test_a_cached_prefix(case: str, length: int):
    expected = golden(GOLDENS / case)[length]
    built, prompt = shuffled(case), expected["input_ids"].tolist()
    run(built, [prompt], greedy(1))
    with watched(built) as seen:
        (got,) = run(built, [prompt], wanted(expected, reports_prompt=False))
    assert got.cached == (length - 1) // 64 * 64
    assert_golden(got, seen, 0, expected)


@pytest.mark.parametrize("case", ["glm_types_mixed_dense2", "v32_fp8_scale_ue8m0"])
def test_bfloat16_runs(case: str):
    """Rounding changes the selection, so there is no bound; half of the rows are close."""
    expected = golden(GOLDENS / case)[max(golden(GOLDENS / case))]
    got, _ = serve(shuffled(case, dtype="bfloat16"), expected)
    error = np.abs(got.prompt_logprobs - logprobs(expected["prefill_logits"])[:-1]).max(-1)
    scale = expected["prefill_logits"].abs().max().item()
    print(f"{case}: half of the rows within {np.median(error) / scale:.1e}")
    assert np.median(error) < 6e-2 * scale
    assert np.isfinite(got.logprobs).all() and np.isfinite(got.prompt_logprobs).all()
