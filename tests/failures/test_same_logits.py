"""Table 1 of known failures of such engines: the rows about numerical results, one test per row.

The model has eight query heads on one KV head, 70 and more candidate pages for a top-k of 4, and
landmark queries so large that another choice of pages moves log-probabilities by 1 and more.

Rows that other files test: 13 tests/cache/test_landmarks.py and tests/runner/test_rows.py,
14 and 17 tests/models/test_weights.py, 24 tests/ops/norm, 30 tests/engine/test_goldens.py; what
holds for every golden model at shorter lengths is in tests/engine/test_invariance.py; rows 3 and 6
(compilation, graphs) need a GPU, tests/runner/test_compiles.py and tests/runner/test_graphs.py.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from cairn.cache.landmarks import SlotMap
from tests.engine.harness import (
    ROUNDING,
    Trace,
    assert_same,
    difference,
    engine,
    greedy,
    poison,
    run,
    text,
)
from tests.failures.models import SIZE, TOPK, WINDOW, again, folder, rows, variant, wide
from tests.failures.oracle import oracle

PER_PAGE = SIZE - 1
LENGTH = 1200


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return folder(tmp_path_factory.mktemp("wide"))


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return text(1, LENGTH)


@pytest.fixture(scope="module")
def formula(model, prompt, device) -> np.ndarray:
    """The oracle's rows of the prompt; at the end it selects among more than 64 pages."""
    logprobs, batch = oracle(wide(model, device=device), prompt)
    last = len(batch.input_ids) - 1
    assert (last - WINDOW + 1) // SIZE > 64
    assert len(batch.selected[1, last, 0]) == TOPK
    return logprobs


@pytest.fixture(scope="module")
def whole(model, prompt, device) -> Trace:
    return run(wide(model, device=device), [prompt], greedy(1, prompt_logprobs=True))[0]


def test_the_choice_of_pages_matters(model, prompt, formula, device):
    """Without this, the following tests would prove little."""
    for change in ({"topk": TOPK - 1}, {"strategy": "softmax_head"}, {"window": WINDOW - SIZE}):
        other, _ = oracle(wide(model, device=device), prompt[:200], **change)
        assert difference(other, formula[:200]) > 1.0


def test_row_1_no_length_gives_nan(model, prompt, formula, device):
    built = wide(model, device=device)
    lengths = range(1, 5 * SIZE)
    for n, got in zip(lengths, run(built, [prompt[:n] for n in lengths], greedy(1)), strict=True):
        assert difference(got.logprobs, formula[n - 1 : n]) < ROUNDING, f"length {n}"


@pytest.mark.parametrize(
    "budgets",
    [[1040, *[1] * 300], [37], [64], [65], [1000]],
    ids=["1", "37", "64", "65", "1000"],
)
def test_row_4_chunked_prefill_equals_one_shot(model, prompt, whole, budgets, device):
    parts = run(
        wide(model, device=device),
        [prompt],
        greedy(1, prompt_logprobs=True),
        budgets=budgets,
        poisoned=False,
    )[0]
    assert_same(whole, parts)


def test_row_5_reused_prefix_equals_cold_cache(model, prompt, device):
    """Two branches of a cached prompt, which generate until reused pages have left the window."""
    built = wide(model, device=device)
    run(built, [prompt], greedy(1))
    for kept in (1100, 640):
        branch = prompt[:kept] + text(kept, LENGTH - kept)
        warm = run(built, [branch], greedy(6 * SIZE))[0]
        cold = run(
            wide(model, device=device, enable_prefix_caching=False), [branch], greedy(6 * SIZE)
        )[0]
        assert warm.cached == kept // PER_PAGE * PER_PAGE
        assert cold.cached == 0
        assert_same(warm, cold)


def test_row_10_pages_completed_by_decode_get_their_summary(model, device):
    """Many windows in one request: its own pages become candidates."""
    start = text(10, 100)
    got = run(wide(model, device=device), [start], greedy(160))[0]
    assert again(wide(model, device=device), start, got) < ROUNDING


def test_row_11_a_batch_decodes_like_its_members(model, prompt, device):
    """Eight prompts of different lengths, 5 pages of output each, against each one alone."""
    lengths = [1, 14, 15, 16, 61, 200, 455, 1100]
    prompts = [prompt[:n] for n in lengths]
    got = run(wide(model, device=device), prompts, greedy(5 * PER_PAGE), poisoned=False)
    alone = wide(model, device=device, enable_prefix_caching=False)
    for start, one in zip(prompts, got, strict=True):
        assert again(alone, start, one) < ROUNDING, f"length {len(start)}"


def test_row_15_the_prior_counts_in_selection_and_in_the_weights(
    model, prompt, whole, formula, device
):
    built = wide(model, device=device)
    run(built, [prompt], greedy(1), poisoned=False)
    bias = built.runner.pools.pages[1]["summary_bias"]
    written = bias[~bias.isnan()]
    assert written.max() - written.min() > 1.0
    assert difference(rows(whole), formula) < ROUNDING


@pytest.mark.parametrize("softmax1", [True, False])
def test_row_16_short_prompts_keep_the_zero_logit(tmp_path, softmax1, device):
    """Lengths 1 to 300; the oracle's rows come from one long sequence, so they do not depend on the
    length."""
    case = "qwen_gqa4_prior_lora_inrange"
    built = engine(str(variant(tmp_path / "m", case, enable_softmax1=softmax1)), device=device)
    tokens = text(16, 300)
    want, _ = oracle(built, tokens)
    edges = {e + i for e in (*range(0, 300, 45), *range(0, 300, 48)) for i in (-1, 0, 1)}
    lengths = [n for n in range(1, 301) if n < 3 * SIZE or n in edges or n == 300]
    prompts = [tokens[:n] for n in lengths]
    got = run(built, prompts, greedy(1), poisoned=False)
    for n, one in zip(lengths, got, strict=True):
        assert difference(one.logprobs, want[n - 1 : n]) < ROUNDING, f"length {n}"


def test_row_19_physical_places_do_not_matter(model, prompt, whole, device):
    built = wide(model, device=device)
    allocator = built.core.cache.allocator
    taken = allocator.take(allocator.num_free)
    random.Random(4).shuffle(taken)
    for page in taken:
        allocator.free([page])
    assert_same(whole, run(built, [prompt], greedy(1, prompt_logprobs=True))[0])


@pytest.mark.parametrize("extra", [1, 2, 3])
def test_row_20_one_to_three_tokens_extend_a_prefix(model, prompt, formula, extra, device):
    built = wide(model, device=device)
    kept = 70 * PER_PAGE
    run(built, [prompt[: kept + 5]], greedy(1))
    got = run(built, [prompt[: kept + extra]], greedy(1))[0]
    assert got.cached == kept
    assert difference(got.logprobs, formula[kept + extra - 1 : kept + extra]) < ROUNDING


def test_row_25_prompt_logprobs_belong_to_their_tokens(model, prompt, whole, formula, device):
    """Entry i belongs to token i, across landmarks, and has user ids only."""
    built = wide(model, device=device)
    params = greedy(1, prompt_logprobs=True)
    live = built.core.add("one", prompt, params)
    while built.core.has_work:
        built.core.step()
    entries = live.prompt_logprobs
    assert entries[0] is None
    assert len(entries) == LENGTH
    for i in (1, PER_PAGE - 1, PER_PAGE, PER_PAGE + 1, 40 * PER_PAGE, LENGTH - 1):
        assert set(entries[i]) == set(range(200))
        assert entries[i][prompt[i]].logprob == pytest.approx(formula[i - 1, prompt[i]], abs=1e-3)


@pytest.mark.parametrize("length", [70 * PER_PAGE - 1, 70 * PER_PAGE, 70 * PER_PAGE + 1])
def test_row_25_an_identical_prompt_again(model, prompt, formula, length, device):
    built = wide(model, device=device)
    for cached in (0, (length - 1) // PER_PAGE * PER_PAGE):
        got = run(built, [prompt[:length]], greedy(1))[0]
        assert got.cached == cached
        assert difference(got.logprobs, formula[length - 1 : length]) < ROUNDING


@pytest.mark.parametrize("length", [1150, 1154, 1155, 1156])
def test_row_27_decode_selects_like_prefill(model, prompt, formula, length, device):
    """prefill(N) and one decode step, compared with prefill(N + 1), with eight heads per group."""
    got = run(wide(model, device=device), [prompt[:length]], greedy(2))[0]
    both = prompt[:length] + got.tokens[:1]
    longer = run(wide(model, device=device), [both], greedy(1))[0]
    assert difference(got.logprobs[:1], formula[length - 1 : length]) < ROUNDING
    assert difference(got.logprobs[1:], longer.logprobs) < ROUNDING


def prefill_then(built, prompt, act, count: int = 4) -> np.ndarray:
    """Log-probabilities of `count` decoded tokens; `act` is called between prefill and decode."""
    live = built.core.add("one", prompt, greedy(count + 1))
    while not live.stream.output.token_ids:
        built.core.step()
    act(built.runner.pools)
    while built.core.has_work:
        built.core.step()
    entries = live.stream.output.logprobs[1:]
    return np.array([[entry[t].logprob for t in range(200)] for entry in entries])


def test_huge_values_under_landmarks_change_nothing(model, prompt, device):
    def poison_landmarks(pools):
        for tensor in (layer[name] for layer in pools.pages for name in ("k", "v")):
            tensor[:, :, -1] = 1e4

    plain = prefill_then(wide(model, device=device), prompt, lambda pools: None)
    assert (
        difference(plain, prefill_then(wide(model, device=device), prompt, poison_landmarks)) == 0.0
    )


def test_row_8_without_its_summaries_the_model_answers_otherwise(model, prompt, device):
    def forget(pools):
        for tensor in (
            layer.get(n) for layer in pools.pages for n in ("summary_key", "summary_bias")
        ):
            tensor.zero_()

    plain = prefill_then(wide(model, device=device), prompt, lambda pools: None)
    assert difference(plain, prefill_then(wide(model, device=device), prompt, forget)) > 0.1


def test_row_8_where_the_summary_is_the_landmarks_own_key(device):
    def forget(pools):
        for keys in (layer["k"] for layer in pools.pages):
            keys[:, :, -1] = 0.0

    case, tokens = "qwen_noprior_lmk_k", text(8, 1200)
    plain = prefill_then(engine(case, device=device), tokens, lambda pools: None)
    assert difference(plain, prefill_then(engine(case, device=device), tokens, forget)) > 0.01


def test_a_branch_leaves_the_prefix_bits_alone(model, prompt, device):
    """All bytes of a finished prompt's cached pages are unchanged by two branches and their
    decoding."""
    built = wide(model, device=device)
    run(built, [prompt], greedy(1))
    lease = built.core.cache.open(prompt, LENGTH // PER_PAGE)
    pages = list(lease.pages)
    built.core.cache.close(lease)
    assert len(pages) == LENGTH // PER_PAGE
    before = [tensor[pages].clone() for tensor in built.runner.pools.tensors()]
    branches = [prompt[:900] + text(20, 300), prompt[:500] + text(21, 40), prompt]
    run(built, branches, greedy(3 * SIZE), poisoned=False)
    for old, tensor in zip(before, built.runner.pools.tensors(), strict=True):
        assert old.equal(tensor[pages])


def test_a_batch_changes_members_at_a_landmark(model, prompt, device):
    """{r1, r2} -> {r2, r3}: r1 ends and r3 begins in the step in which r2 enters a new page."""
    built = wide(model, device=device, max_num_seqs=2)
    assert built.slots == SlotMap(SIZE, True)
    prompts = [prompt[:100], prompt[: 5 * PER_PAGE - 4], prompt[300 : 300 + 2 * PER_PAGE]]
    counts = [5, 40, 40]
    for shift in (-1, 0, 1):
        counts[0] = 5 + shift
        together = run(built, prompts, [greedy(n) for n in counts])
        poison(built)
        for start, count, got in zip(prompts, counts, together, strict=True):
            alone = run(wide(model, device=device), [start], greedy(count))[0]
            assert_same(alone, got)
