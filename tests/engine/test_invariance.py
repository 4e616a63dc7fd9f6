"""The same tokens give the same logits, for any schedule. Unowned page memory is NaN.

Every comparison is of whole-vocabulary log-probabilities at every position, through the engine. On
a GPU decode steps are graphs, padded to more rows than run.
"""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.cache.invariants import check
from cairn.engine.build import Built
from tests.engine.harness import (
    CASES,
    FEW_CASES,
    ROUNDING,
    Trace,
    assert_same,
    difference,
    engine,
    greedy,
    occupy,
    poison,
    run,
    text,
)
from tests.engine.ties import leave_out_ties
from tests.support import shows

SMALL = [
    "qwen_noprior_lmk_k",
    pytest.param("qwen_gqa4_prior_lora_inrange", marks=pytest.mark.slow),
    pytest.param("olmo_mha_interleave4", marks=pytest.mark.slow),
]
"""The slow ones are families of test_families.py, which runs shorter versions of these
schedules."""


@functools.cache
def in_chunks_of(chunk: int | None, case: str, device: str) -> Trace:
    """A prompt in chunks, and as a whole."""
    # Some steps of one token represent all: at the beginning, and after pages.
    budgets = {None: [], 1: [*[1] * 40, 64]}.get(chunk, [chunk])
    built = engine(case, device=device)
    return run(built, [text(1, 230)], greedy(4, prompt_logprobs=True), budgets=budgets)[0]


@shows("hils", "chunked prefill")
@pytest.mark.parametrize("case", FEW_CASES)
@pytest.mark.parametrize("chunk", [1, 15, 37, 64])
def test_whole_against_chunked_prefill(case, chunk, device):
    assert_same(in_chunks_of(None, case, device), in_chunks_of(chunk, case, device))


@shows("hils", "batching")
@settings(max_examples=2, deadline=None)
@given(
    case=st.sampled_from(CASES),
    seed=st.integers(0, 2**16),
    # Steps of one token are tried above, and take as long as all the rest.
    budgets=st.lists(st.integers(7, 90), min_size=1, max_size=6),
)
def test_random_schedules_of_mixed_lengths_against_single(case, seed, budgets, device):
    rng = random.Random(seed)
    prompts = [text(seed + i, rng.randint(1, 260)) for i in range(3)]
    counts = [rng.randint(1, 20) for _ in prompts]
    together = run(
        engine(case, device=device), prompts, [greedy(n) for n in counts], budgets=budgets
    )
    for prompt, count, got in zip(prompts, counts, together, strict=True):
        single = run(engine(case, device=device), [prompt], greedy(count))[0]
        leave_out_ties(single, got, prompt, engine(case, device=device))
        assert_same(single, got)


@pytest.mark.parametrize("case", FEW_CASES)
def test_decode_against_prefill_over_many_pages(case, device):
    """Decode across 8 pages (3 of 64 slots), then prefill the tokens: far more pages than top-k.

    The text is one in which no page is selected by less than 2e-4 of score in any model: what a
    GPU's products of one row and of many round apart must not decide.
    """
    size = engine(case, device=device).config.page_size
    prompt, count = text(7, 5 * size), (8 if size < 64 else 3) * size
    decoded = run(engine(case, device=device), [prompt], greedy(count))[0]
    again = prompt + decoded.tokens[:-1]
    prefilled = run(engine(case, device=device), [again], greedy(1, prompt_logprobs=True))[0]
    rows = np.concatenate([prefilled.prompt_logprobs[len(prompt) - 1 :], prefilled.logprobs])
    assert difference(decoded.logprobs, rows) < ROUNDING


@shows("hils", "prefix cache")
@pytest.mark.parametrize("share", [0.5, 0.99])
@pytest.mark.parametrize("case", SMALL)
def test_cold_against_warm_prefix(case, share, device):
    """Generation continues until the reused pages have left the window and are read by
    selection."""
    built = engine(case, device=device)
    size = built.config.page_size
    first, length = text(5, 640), 640
    kept = int(length * share)
    prompt = first[:kept] + text(6, length - kept)
    run(built, [first], greedy(1))
    warm = run(built, [prompt], greedy(6 * size))[0]
    cold = run(
        engine(case, device=device, enable_prefix_caching=False), [prompt], greedy(6 * size)
    )[0]
    per_page = size - 1 if built.spec.landmarks else size
    assert cold.cached == 0
    assert warm.cached >= (kept // per_page - 1) * per_page
    assert warm.cached <= kept
    assert_same(warm, cold)


@pytest.mark.parametrize("case", SMALL)
def test_an_identical_prompt_again(case, device):
    """A full prefix hit, at prompt lengths around the end of a page."""
    built = engine(case, device=device)
    per_page = built.slots.tokens_per_page
    for length in (per_page * 9 - 1, per_page * 9, per_page * 9 + 1):
        prompt = text(length, length)
        cold = run(built, [prompt], greedy(3))[0]
        warm = run(built, [prompt], greedy(3))[0]
        assert warm.cached >= (length - 1) // per_page * per_page - per_page
        assert warm.cached < length
        assert_same(cold, warm)


def test_equal_requests_in_all_rows_are_not_retracted(device) -> None:
    """The last two compute pages that the tree has of the first two: they are not held twice."""
    built = engine("olmo_mha_interleave4", device=device, max_num_seqs=2, max_model_len=45)
    assert built.memory.num_pages == 2 * 3
    first, *others = run(built, [[7, 5, 3, 1]] * 4, greedy(41))
    assert built.core.scheduler.preemptions == 0
    for found in others:
        assert_same(found, first)
    check(built.core.cache, [])


@pytest.mark.parametrize("case", SMALL)
def test_retracted_and_resumed_against_undisturbed(case, device):
    size = engine(case, device=device).config.page_size
    prompts = [text(20 + i, 3 * size) for i in range(4)]
    tight = engine(case, device=device, max_model_len=12 * size)
    # Half of the pages are unavailable: four sequences of five pages cannot run together.
    cache = tight.core.cache
    hostage = occupy(cache, keep=15)
    got = run(tight, prompts, greedy(2 * size), poisoned=True)
    assert tight.core.scheduler.preemptions > 0
    cache.close(hostage)
    for prompt, one in zip(prompts, got, strict=True):
        assert_same(run(engine(case, device=device), [prompt], greedy(2 * size))[0], one)


@pytest.mark.parametrize("case", SMALL)
def test_permuted_physical_pages(case, device):
    prompt = text(9, 300)
    plain = run(engine(case, device=device), [prompt], greedy(20, prompt_logprobs=True))[0]
    built = engine(case, device=device)
    allocator = built.core.cache.allocator
    taken = allocator.take(allocator.num_free)
    random.Random(4).shuffle(taken)
    for page in taken:
        allocator.free([page])
    assert_same(plain, run(built, [prompt], greedy(20, prompt_logprobs=True))[0])


class Writes:
    """Wraps an executor and computes from its plans which slots the last plan may write."""

    def __init__(self, built: Built) -> None:
        self.inner, self.slots = built.core.executor, built.slots
        self.pages: dict[tuple[bool, int], list[int]] = {}
        self.places: dict[bool, set[tuple[int, int]]] = {False: set(), True: set()}

    def launch(self, plan):
        size = self.slots.page_size
        for opened in plan.opened:
            self.pages[False, opened.row], self.pages[True, opened.row] = [], []
        for grant in plan.grants:
            pages, own = self.pages[False, grant.row], self.pages[True, grant.row]
            assert len(pages) == grant.first
            pages += grant.pages
            own += [-1] * (len(grant.pages) - len(grant.window)) + list(grant.window)
        self.places = {
            own: {
                (self.pages[own, work.row][slot // size], slot % size)
                for work in plan.row_by_row()
                for slot in range(
                    self.slots.slots_for(work.first),
                    self.slots.slots_for(work.first + work.num_tokens),
                )
            }
            for own in (False, True)
        }
        return self.inner.launch(plan)


@pytest.mark.parametrize("case", ["olmo_mha_interleave4", "qwen_noprior_lmk_k"])
def test_a_step_writes_the_slots_it_runs_and_no_others(case, device):
    """Shared prefixes, page ends, preemptions; 5 rows leave padding in a graph of 8."""
    built = engine(case, device=device, max_num_seqs=5, kv_cache_memory="2MiB")
    core, pools, size = built.core, built.runner.pools, built.config.page_size
    shared = text(30, 4 * size)
    run(built, [shared], greedy(1))
    occupy(core.cache, keep=20)
    core.executor = writes = Writes(built)
    for i in range(7):
        core.add(f"w{i}", shared[: 3 * size] + text(31 + i, 1 + i * 5), greedy(3 * size + i))
    while core.has_work:
        poison(built)
        tensors = [(own, t) for own in range(len(pools.sizes.pages)) for t in pools.tensors(own)]
        before = [tensor.clone() for _, tensor in tensors]
        writes.places = {0: set(), 1: set()}
        core.step()
        for old, (own, new) in zip(before, tensors, strict=True):
            places = writes.places[own]
            count = pools.sizes.pages[own]
            changed = (old.view(torch.int32) != new.view(torch.int32))[:count]
            if new.dim() == 4:
                found = changed.any(dim=3).any(dim=1).nonzero().tolist()
                assert {(page, slot) for page, slot in found} <= places
                written = [new[page, :, slot] for page, slot in places]
            else:
                complete = {page for page, slot in places if slot == size - 1}
                assert set(changed.flatten(1).any(dim=1).nonzero()[:, 0].tolist()) <= complete
                written = [new[page] for page in complete]
            assert not any(part.isnan().any() for part in written)
    assert core.scheduler.preemptions > 0


@pytest.mark.parametrize(
    "case, all_below", [("qwen_gqa4_prior_lora_inrange", 80), ("olmo_mha_interleave4", 1)]
)
def test_lengths_from_1_to_400(case, all_below, device):
    """Rows 0 .. n of a prompt do not depend on the following tokens; no length gives NaN. From
    `all_below` on, lengths are 7 apart, which covers every position in a page of 15 tokens."""
    built = engine(
        case, device=device, enable_prefix_caching=False, max_num_seqs=64, kv_cache_memory="64MiB"
    )
    prompt = text(11, 400)
    whole = run(built, [prompt], greedy(1, prompt_logprobs=True), poisoned=False)[0]
    reference = np.concatenate([whole.prompt_logprobs, whole.logprobs])
    all_lengths = [*range(1, all_below), *range(all_below, 401, 7)]
    for at in range(0, len(all_lengths), 50):
        part = all_lengths[at : at + 50]
        got = run(built, [prompt[:n] for n in part], greedy(1), poisoned=False)
        poison(built)
        for n, one in zip(part, got, strict=True):
            assert difference(one.logprobs[0], reference[n - 1]) < ROUNDING, f"length {n}"
