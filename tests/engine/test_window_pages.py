"""Models in which some layers see a window alone: their pages behind it are given back, and nothing
of that shows in any logit. What is free is NaN, so that reading it would show.
"""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.cache.invariants import check
from cairn.engine.build import Built
from cairn.engine.planned_step import Limits
from tests.engine.harness import (
    Trace,
    assert_same,
    engine,
    greedy,
    occupy,
    poison,
    run,
    text,
    trace,
)
from tests.engine.ties import leave_out_ties
from tests.specs import kinds
from tests.support import shows

CASES = ["olmo_mha_interleave4", "qwen_nope_interleave2", "qwen_num_swa_layers2"]
FEW_CASES = [pytest.param(CASES[0], marks=pytest.mark.slow), *CASES[1:]]
"""The slow one has four times the layers; the random schedules cover all."""


def serve(built: Built, prompts, counts, budgets, waits, overlap) -> list[Trace]:
    """Prompts that run one after the other, in steps of changing size."""
    core, rows = built.core, built.config.max_num_seqs
    core.overlap = overlap
    live, step = [], 0
    while len(live) < len(prompts) or core.has_work:
        if len(live) < len(prompts) and step >= sum(waits[: len(live)]):
            n = len(live)
            live.append(core.add(f"r{core._arrivals}", prompts[n], greedy(counts[n])))
        core.scheduler.limits = Limits(rows, budgets[step % len(budgets)])
        if core.has_work:
            core.step()
        poison(built)
        step += 1
    return [trace(one, built.spec.vocab_size) for one in live]


@settings(max_examples=2, deadline=None)
@given(
    case=st.sampled_from(CASES),
    seed=st.integers(0, 2**16),
    budgets=st.lists(st.integers(5, 90), min_size=1, max_size=4),
    spare=st.integers(0, 8),
    caching=st.booleans(),
    overlap=st.booleans(),
)
def test_random_schedules_with_few_window_pages(case, seed, budgets, spare, caching, overlap):
    """Shared prefixes, preemptions for lack of either kind of page, prefixes resumed early."""
    built = engine(case, max_num_seqs=4, enable_prefix_caching=caching)
    cache, rng, size = built.core.cache, random.Random(seed), built.config.page_size
    most = built.slots.pages_for(5 * size + 60 + 20)
    window_pages = cache.window.reach + 90 // size + 3
    hostage = occupy(cache, keep=most + spare, keep_window=window_pages + spare)
    shared = text(seed, 5 * size)
    prompts = [shared[: rng.choice((0, size, 5 * size))] for _ in range(4)]
    prompts = [start + text(seed + i, rng.randint(1, 60)) for i, start in enumerate(prompts)]
    prompts += prompts[:1]
    counts = [rng.randint(1, 20) for _ in prompts]
    waits = [rng.randint(0, 4) for _ in prompts]
    got = serve(built, prompts, counts, budgets, waits, overlap)
    check(cache, [hostage])
    plain = engine(case, enable_prefix_caching=False)
    for prompt, count, one in zip(prompts, counts, got, strict=True):
        single = run(plain, [prompt], greedy(count))[0]
        leave_out_ties(single, one, prompt, plain)
        assert_same(single, one)


@shows("hils", "sliding window")
@pytest.mark.parametrize("case", CASES)
def test_window_pages_before_the_window_are_freed(case, device):
    """Prefill and decode of a long context hold as few window pages as those of a short one."""
    built = engine(case, device=device, enable_prefix_caching=False)
    cache, size = built.core.cache, built.config.page_size
    window = cache.window
    held = []
    for length in (300, 900):
        built.core.add(f"n{length}", text(1, length), greedy(3 * size))
        built.core.scheduler.limits = Limits(1, 64)
        most = pages = 0
        while built.core.has_work:
            built.core.step()
            poison(built)
            most = max(most, window.num_pages - window.num_free)
            pages = max(pages, cache.num_owned)
        # The pages that the last step took are free when it has ended.
        assert pages >= built.slots.pages_for(length + 3 * size - 1) - 1
        held.append(most)
    in_flight = 1 + built.core.overlap
    # One page more or less, depending on how chunks fall on pages.
    assert abs(held[0] - held[1]) <= 1
    assert max(held) <= window.reach + in_flight * 64 // size + 2


@pytest.mark.parametrize("case", FEW_CASES)
def test_a_prefix_resumed_after_its_window_was_given_up(case, device):
    """A warm cache gives the results of a cold one, with the window pages before the prefix's end
    present and evicted."""
    built = engine(case, device=device)
    cache = built.core.cache
    first = text(5, 400)
    longer = first + text(6, 50)
    cold = run(engine(case, device=device), [longer], greedy(40))[0]
    run(built, [first], greedy(1))
    warm = run(built, [longer], greedy(40))[0]
    assert warm.cached >= 400 - 2 * built.config.page_size
    assert_same(cold, warm)
    # All window pages without an owner: cached prefixes have lost theirs.
    cache.window.release(cache.window.take(cache.window.available), wanted=False)
    poison(built)
    again = run(built, [longer], greedy(40))[0]
    assert again.cached == 0
    assert_same(cold, again)
    assert run(built, [longer], greedy(40))[0].cached > 400
    check(cache, [])


@pytest.mark.parametrize("case", FEW_CASES)
def test_retracted_for_want_of_window_pages(case, device):
    """Four rows begin with a page each; in the end the pages of two windows are not enough for
    all."""
    size = engine(case).config.page_size
    prompts = [text(20 + i, size // 2) for i in range(4)]
    built = engine(case, device=device, chunked_prefill_size=2 * size)
    window = built.core.cache.window
    window.take(window.available - 2 * (window.reach + 1))
    got = run(built, prompts, greedy(2 * size))
    assert built.core.scheduler.preemptions > 0
    for prompt, one in zip(prompts, got, strict=True):
        assert_same(run(engine(case, device=device), [prompt], greedy(2 * size))[0], one)


@pytest.mark.parametrize("case", CASES)
def test_the_layers_pools(case):
    """Window layers have the window pages; each layer's storage has the planned size."""
    built = engine(case)
    pools, memory = built.runner.pools, built.memory
    owners = zip(kinds(built.spec), pools.schema.group_of, pools.pages, strict=True)
    for kind, groups, fields in owners:
        own = kind == "window"
        assert set(groups.values()) == {own}
        assert len(fields["k"]) == (memory.window_pages if own else memory.num_pages)
    size = sum(tensor.nbytes for tensor in pools.tensors())
    table = dict(built.table)
    assert size == pools.nbytes == table["pages"] + table["window pages"] <= 8 << 20


@pytest.mark.parametrize("case", ["qwen_gqa4_prior_lora_inrange", "qwen_c64"])
def test_layers_of_one_kind_share_their_pages(case):
    built = engine(case)
    assert built.core.cache.window is None
    assert built.memory.window_pages == 0 and len(built.runner.rows.page_tables) == 1
    assert "window pages" not in dict(built.table)
    built = engine(case, attention_backend="window")
    assert built.core.cache.window is None


def test_landmark_layers_forced_to_their_window_are_window_layers():
    """One of two landmark layers reads only its window: aligned to pages, and released alike."""
    case = "qwen_gqa4_prior_lora_inrange"
    prompt = text(3, 300)
    built = engine(case, hsa_layers="1", enable_prefix_caching=False)
    assert built.runner.pools.schema.groups[1].layers == (0,)
    whole = run(built, [prompt], greedy(20))[0]
    parts = run(
        engine(case, hsa_layers="1", enable_prefix_caching=False),
        [prompt],
        greedy(20),
        budgets=[37],
    )[0]
    assert_same(whole, parts)
    assert torch.isfinite(torch.tensor(whole.logprobs)).all()
