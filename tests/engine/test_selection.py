"""Selection reports, compared with the formulas and the reference's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from cairn.engine.build import Built
from cairn.engine.continuation import Continuation
from cairn.engine.planned_step import Limits
from cairn.errors import BadRequest
from cairn.llm import LLM
from cairn.models.registry import load_spec
from cairn.types import LayerSelection, SamplingParams
from tests.engine.harness import (
    FEW_CASES,
    GOLDENS,
    TRACED,
    engine,
    greedy,
    lengths,
    poison,
    text,
    trace,
    vectors,
)
from tests.failures.models import folder, variant, wide
from tests.failures.oracle import OracleBatch, oracle
from tests.specs import hils_of

SMALL = ["qwen_gqa4_prior_lora_inrange", "olmo_mha_interleave4", "qwen_noprior_lmk_k"]
Report = tuple[LayerSelection, ...]


def asking(max_tokens: int) -> SamplingParams:
    return replace(greedy(max_tokens), selection=True)


def serve(
    built: Built,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    budgets: Sequence[int] = (1024,),
) -> list[Continuation]:
    """Run prompts together, step i with budgets[i % len] slots and free pages filled with NaN."""
    core = built.core
    live = [
        core.add(f"r{i}", list(prompt), param)
        for i, (prompt, param) in enumerate(zip(prompts, params, strict=True))
    ]
    step = 0
    while core.has_work:
        core.scheduler.limits = Limits(built.config.max_num_seqs, budgets[step % len(budgets)])
        core.step()
        poison(built)
        step += 1
    return live


def assert_report(report: Report, expected: dict[int, tuple[dict[int, float], float]]) -> None:
    """Check that a report has the expected layers, each with page weights and the window's
    weight."""
    assert [layer.layer for layer in report] == sorted(expected)
    for layer in report:
        pages, window = expected[layer.layer]
        assert dict(zip(layer.pages, layer.weights, strict=True)) == pytest.approx(pages, abs=2e-4)
        assert layer.window == pytest.approx(window, abs=2e-4)
        assert list(layer.weights) == sorted(layer.weights, reverse=True)


def from_oracle(batch: OracleBatch, token: int) -> dict[int, tuple[dict[int, float], float]]:
    """What the query of user token `token` selects by the formulas."""
    own = hils_of(batch.spec)
    heads, groups = own.num_heads, own.num_kv_heads
    slot = int(batch.users[token])
    found = {}
    for layer in batch.landmark_layers:
        pages: dict[int, float] = {}
        window = 0.0
        for head in range(heads):
            chosen = batch.selected[layer, slot, head // (heads // groups)]
            *shares, own = batch.weights[layer, slot, head]
            for page, share in zip(chosen, shares, strict=True):
                pages[page] = pages.get(page, 0.0) + share / heads
            window += own / heads
        found[layer] = pages, window
    return found


def check_against_oracle(built: Built, budgets: Sequence[int]) -> None:
    """A request with a report between two without, from its prefill over several pages of
    decode."""
    size = built.config.page_size
    prompt, count = text(40, 7 * size + 3), size + 5
    others = [text(41, 5), text(42, 9 * size)]
    params = [greedy(count), asking(count), greedy(count)]
    live = serve(built, [others[0], prompt, others[1]], params, budgets)
    assert live[0].stream.output.selection is None
    assert live[2].stream.output.selection is None
    output = live[1].stream.output
    assert output.selection is not None
    assert len(output.selection) == len(output.token_ids) == count
    _, batch = oracle(built, prompt + output.token_ids[:-1])
    for i, report in enumerate(output.selection):
        assert_report(report, from_oracle(batch, len(prompt) - 1 + i))


@pytest.mark.parametrize("case", FEW_CASES)
def test_every_token_against_the_formulas(case, device):
    check_against_oracle(engine(case, device=device), budgets=(37, 1, 64))


@pytest.mark.parametrize("case", SMALL)
def test_the_other_softmax_mode(tmp_path, case, device):
    """The strategy that the model was not trained with; the previous test has the other one."""
    softmax1 = not hils_of(load_spec(GOLDENS / case)).softmax1
    at = variant(tmp_path / "m", case, enable_softmax1=softmax1)
    built = engine(str(at), device=device)
    assert hils_of(built.spec).softmax1 == softmax1
    check_against_oracle(built, budgets=(1024,))


@pytest.mark.parametrize("strategy", ["group", "head", "softmax_head"])
def test_older_strategies(strategy, device):
    built = engine("qwen_gqa4_prior_lora_inrange", device=device, hsa_selection_strategy=strategy)
    check_against_oracle(built, budgets=(50,))


@pytest.mark.parametrize("case", TRACED)
def test_prompt_ends_against_the_reference(case, device):
    """The first token of prompts of many lengths; the query at each end is one of a golden."""
    length = max(lengths(case))
    golden = {
        name.split(".", 1)[1]: value
        for name, value in vectors(case).items()
        if name.startswith(f"n{length}.")
    }
    built = engine(case, device=device)
    own, layer = hils_of(built.spec), built.spec.selecting_layers[-1]
    ends = sorted({1, length // 3, length // 2, length - 1, length})
    prompts = [golden["input_ids"][:end].tolist() for end in ends]
    live = serve(built, prompts, [asking(1)] * len(ends))
    for end, continuation in zip(ends, live, strict=True):
        slot = built.slots.slot_of(end - 1)
        weights = golden["chunk_weights"][slot]
        shares: dict[int, float] = {}
        group = own.num_heads // own.num_kv_heads
        for head in range(own.num_heads):
            for k, page in enumerate(golden["indices"][slot, head // group].tolist()):
                if page >= 0:
                    part = float(weights[head, k]) / own.num_heads
                    shares[page] = shares.get(page, 0.0) + part
        (report,) = continuation.stream.output.selection
        found = {one.layer: one for one in report}
        assert tuple(found) == built.spec.selecting_layers
        window = float(weights[:, own.topk].mean())
        assert_report((found[layer],), {layer: (shares, window)})


def test_retracted_and_resumed(device):
    """With preemptions between tokens, each token's report appears once."""
    built = engine("qwen_gqa4_prior_lora_inrange", device=device, max_num_seqs=4)
    size, cache = built.config.page_size, built.core.cache
    hostage = cache.open([1], 0)
    assert cache.grow(hostage, cache.num_pages - 22)
    prompts = [text(20 + i, 3 * size) for i in range(4)]
    live = serve(built, prompts, [asking(5 * size)] * 4)
    last = live[-1]
    assert last.request.retractions > 0
    output = last.stream.output
    assert len(output.selection) == len(output.token_ids)
    _, batch = oracle(built, prompts[-1] + output.token_ids[:-1])
    for i, report in enumerate(output.selection):
        assert_report(report, from_oracle(batch, len(prompts[-1]) - 1 + i))


@pytest.mark.parametrize("case", SMALL)
def test_asking_changes_no_bit(case, device):
    prompt = text(3, 250)
    (plain,) = serve(engine(case, device=device), [prompt], [greedy(30)], budgets=(100,))
    built = engine(case, device=device)
    (asked,) = serve(built, [prompt], [asking(30)], budgets=(100,))
    a, b = trace(plain, built.spec.vocab_size), trace(asked, built.spec.vocab_size)
    assert a.tokens == b.tokens
    assert np.array_equal(a.logprobs, b.logprobs, equal_nan=True)


def test_a_context_under_the_window_reads_the_window_alone():
    built = engine("qwen_noprior_lmk_k")
    (got,) = serve(built, [[5, 6]], [asking(2)])
    for report in got.stream.output.selection:
        for layer in report:
            assert layer.pages == layer.weights == ()
            assert 0 < layer.window <= 1


def test_only_layers_that_select_are_reported(tmp_path):
    built = wide(folder(tmp_path / "m"), hsa_layers="1")
    (got,) = serve(built, [text(1, 150)], [asking(3)])
    for report in got.stream.output.selection:
        assert [layer.layer for layer in report] == [1]
        assert report[0].pages


@pytest.mark.parametrize("options", [{"attention_backend": "dense"}, {"hsa_layers": []}])
def test_refused_where_no_layer_selects(options):
    built = engine("qwen_noprior_lmk_k", **options)
    with pytest.raises(BadRequest, match="selection"):
        built.core.add("r", [1, 2, 3], asking(1))


def test_every_continuation_has_its_own():
    llm = LLM(str(GOLDENS / "qwen_noprior_lmk_k"), dtype="float32", kv_cache_memory="8MiB")
    params = SamplingParams(n=2, max_tokens=20, seed=1, selection=True, ignore_eos=True)
    (result,) = llm.generate({"prompt_token_ids": text(8, 150)}, params, use_tqdm=False)
    first, second = (output.selection for output in result.outputs)
    assert len(first) == len(second) == 20
    # Both first tokens come from the same query, computed in two steps.
    as_dict = [dict(zip(layer.pages, layer.weights, strict=True)) for layer in second[0]]
    for layer, weights in zip(first[0], as_dict, strict=True):
        assert dict(zip(layer.pages, layer.weights, strict=True)) == pytest.approx(weights, 1e-4)
    assert first != second
