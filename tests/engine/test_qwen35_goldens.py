"""The Qwen family through the whole engine, compared with reference outputs and with itself."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from cairn.cache.invariants import check
from cairn.engine.build import Built
from tests.engine import harness
from tests.engine.harness import Limits, difference, greedy, text
from tests.engine.qwen35 import (
    CASES,
    GOLDENS,
    RECURRENT,
    Watch,
    engine,
    golden,
    lengths,
    poison,
    serve,
    start,
    step,
)
from tests.support import shows

PROMPTS = [(case, n) for case in CASES for n in lengths(case)]
WHOLE = 4096
CHUNKS = (3, pytest.param(63, marks=pytest.mark.slow), 65, WHOLE)
BOUND = 2e-4
FEW = [RECURRENT[0], *(pytest.param(case, marks=pytest.mark.slow) for case in RECURRENT[1:])]
"""The others are in the random schedules of test_families.py."""


def logprobs(logits: Tensor) -> np.ndarray:
    return torch.log_softmax(logits.double(), -1).numpy()


def relative(own: Tensor, reference: Tensor) -> float:
    return float((own - reference).abs().max() / reference.abs().max())


def state_of(built: Built, name: str, row: int = 0) -> Tensor:
    """The state of a row that a golden calls `name`."""
    layer, kind = name.split(".")
    fields = built.runner.pools.rows[int(layer[1:])]
    if "conv" in kind:
        return fields["conv"][row]
    return fields["state"][row].transpose(-1, -2)


def by_expert(experts: Tensor, weights: Tensor, count: int) -> Tensor:
    return torch.zeros(len(experts), count).scatter(1, experts.long(), weights)


@shows("qwen3_moe qwen3_next qwen3_5 qwen3_5_moe", "reference logits", "chunked prefill")
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize(("case", "length"), PROMPTS)
def test_goldens(case: str, length: int, chunk: int) -> None:
    reference = golden(case, length)
    built = engine(case, max_num_seqs=1)
    watch = Watch(built)
    # Different chunks of a prompt would change the next tokens.
    tokens = reference["greedy_ids"].tolist()[: None if chunk == WHOLE else 2]
    built.core.scheduler.limits = Limits(1, chunk)
    prompt = reference["input_ids"].tolist()
    live = built.core.add("r", prompt, greedy(len(tokens), prompt_logprobs=True))
    states = {n: t for n, t in reference.items() if "state" in n}
    checked = False
    while built.core.has_work:
        built.core.step()
        if not checked and live.stream.output.token_ids:
            checked = True
            for name, value in states.items():
                if "end_" not in name:
                    assert relative(state_of(built, name), value) < BOUND, name
        if built.core.has_work:
            poison(built)
    assert checked
    got = harness.trace(live, built.spec.vocab_size)
    scale = float(reference["prefill_logits"].abs().max())
    assert got.tokens == tokens
    prefill, decode = (logprobs(reference[f"{n}_logits"]) for n in ("prefill", "decode"))
    assert difference(got.prompt_logprobs, prefill[:-1]) < BOUND * scale
    assert difference(got.logprobs, decode[: len(tokens)]) < BOUND * scale
    for name, value in states.items():
        if "end_" in name and chunk == WHOLE:
            assert relative(state_of(built, name.replace("end_", "")), value) < BOUND, name
    for name, value in reference.items():
        if name.endswith(".o"):
            assert relative(watch[name][:length], value) < BOUND, name
        if name.endswith(".experts"):
            weights = name.replace("experts", "weights")
            count = int(value.max()) + 1
            assert watch[name][:length].max() < count
            own = by_expert(watch[name][:length], watch[weights][:length], count)
            wanted = by_expert(value, reference[weights], count)
            assert torch.equal(own > 0, wanted > 0), name
            assert (own - wanted).abs().max() < 1e-4, weights


@shows("qwen3_next qwen3_5 qwen3_5_moe", "batching")
@pytest.mark.parametrize("case", FEW)
def test_a_batch_gives_what_each_request_gives_alone(case: str) -> None:
    prompts = [text(seed, length, 140) for seed, length in enumerate((1, 70, 129, 5))]
    alone = engine(case, enable_prefix_caching=False)
    wanted = [serve(alone, [prompt], 5)[0] for prompt in prompts]
    for budget in (50, WHOLE):
        together = serve(engine(case), prompts, 5, budget)
        for a, b in zip(together, wanted, strict=True):
            assert a.tokens == b.tokens
            assert difference(a.logprobs, b.logprobs) < BOUND * 12


@shows("qwen3_5 qwen3_5_moe", "prefix cache")
@pytest.mark.parametrize("case", FEW)
def test_a_cached_prefix_is_resumed_where_a_snapshot_is(case: str) -> None:
    cold = engine(case, enable_prefix_caching=False)
    built = engine(case)
    prefix = text(1, 400, 140)
    serve(built, [prefix], 2)
    prompts = {
        # The end of the prompt, whole and extended; then a branch without a snapshot, twice.
        384: [prefix, prefix + text(2, 90, 140)],
        192: [prefix[:192] + text(3, 30, 140), prefix[:192] + text(4, 30, 140)],
    }
    found = []
    for wanted, some in prompts.items():
        for prompt in some:
            (got,) = serve(built, [prompt], 3)
            (plain,) = serve(cold, [prompt], 3)
            assert got.tokens == plain.tokens
            assert difference(got.logprobs, plain.logprobs) < BOUND * 12
            found.append((wanted, got.cached))
    assert found[0] == (384, 384) and found[1] == (384, 384)
    # The first request of a branch resumes at most from an earlier snapshot, and leaves one there.
    assert found[2][1] <= 192
    assert found[3] == (192, 192)


@pytest.mark.parametrize("case", RECURRENT[:1])
def test_an_output_is_resumed_from(case: str) -> None:
    """The next turn of a conversation resumes after the last one's output."""
    built = engine(case)
    prompt = text(5, 200, 140)
    (first,) = serve(built, [prompt], 60)
    following = prompt + first.tokens + text(6, 20, 140)
    (second,) = serve(built, [following], 3)
    assert second.cached == 256
    (plain,) = serve(engine(case, enable_prefix_caching=False), [following], 3)
    assert second.tokens == plain.tokens
    assert difference(second.logprobs, plain.logprobs) < BOUND * 12


@pytest.mark.parametrize("case", FEW)
def test_retracted_requests_go_on(case: str) -> None:
    prompts = [text(seed, 60 + 64 * (seed % 2), 140) for seed in range(4)]
    alone = engine(case, enable_prefix_caching=False)
    wanted = [serve(alone, [prompt], 12)[0] for prompt in prompts]
    built = engine(case)
    held = harness.occupy(built.core.cache, keep=6)
    built.core.scheduler.limits = Limits(4, 100)
    live = [start(built, prompt, 12) for prompt in prompts]
    while built.core.has_work:
        built.core.step()
        leases = [r.lease for r in built.core.scheduler.running if r.lease is not None]
        check(built.core.cache, [held, *leases])
        poison(built)
    assert built.core.scheduler.preemptions > 0
    for continuation, plain in zip(live, wanted, strict=True):
        got = harness.trace(continuation, built.spec.vocab_size)
        assert got.tokens == plain.tokens
        assert difference(got.logprobs, plain.logprobs) < BOUND * 12


@pytest.mark.parametrize("case", RECURRENT[:1])
def test_few_snapshots_and_aborts(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that arrive, end early and share prefixes, with few snapshots: outputs are unchanged
    and nothing leaks."""
    rng = random.Random(7)
    cold = engine(case, enable_prefix_caching=False)
    monkeypatch.setattr("cairn.engine.memory.SNAPSHOT_SHARE", 0.03)
    built = engine(case, kv_cache_memory="2MiB", max_num_seqs=3, max_model_len=512)
    states = built.core.cache.states
    assert states is not None and 1 <= states.count <= 4
    roots = [text(seed, 300, 140) for seed in range(3)]
    live, wanted, stopped = {}, {}, 0
    for number in range(15):
        root = rng.choice(roots)
        prompt = root[: rng.randrange(1, 300)] + text(number, rng.randrange(1, 40), 140)
        (wanted[number],) = serve(cold, [prompt], 4)
        live[number] = start(built, prompt, 4)
        built.core.scheduler.limits = Limits(3, rng.choice((40, 64, 100, 300)))
        for _ in range(rng.randrange(6)):
            step(built)
        if number % 5 == 4 and not live[number].stream.output.token_ids:
            built.core.abort(live.pop(number).request.id)
            stopped += 1
    while built.core.has_work:
        step(built)
    assert stopped and states.evicted
    for number, continuation in live.items():
        got = harness.trace(continuation, built.spec.vocab_size)
        assert got.tokens == wanted[number].tokens
        assert difference(got.logprobs, wanted[number].logprobs) < BOUND * 12
    assert states.num_free + states.num_kept == states.count


def test_a_model_of_recurrent_layers_alone(tmp_path: Path) -> None:
    """No layer has pages, but the prefix cache still uses them as keys."""
    config = json.loads((GOLDENS / "q35_moe_3to1" / "config.json").read_text())
    config["text_config"] |= {"layer_types": ["linear_attention"] * 4, "linear_conv_kernel_dim": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    built = engine(tmp_path, load_format="random")
    prompt = text(1, 150, 140)
    found = [serve(built, [prompt], 4, budget)[0] for budget in (WHOLE, 7)]
    cold = engine(tmp_path, load_format="random", enable_prefix_caching=False)
    (wanted,) = serve(cold, [prompt], 4, 7)
    assert [got.cached for got in found] == [0, 128]
    for got in found:
        assert got.tokens == wanted.tokens
        assert difference(got.logprobs, wanted.logprobs) < 1e-3
