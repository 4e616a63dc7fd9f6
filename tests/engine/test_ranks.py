"""Tensor parallelism gives the results of one rank, or an error with the reason."""

from __future__ import annotations

import json
import random
import re
import subprocess
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from cairn.cache.invariants import check
from cairn.config import EngineOptions, Machine, resolve
from cairn.distributed.groups import ALONE, Group
from cairn.engine import ranks as module
from cairn.engine.build import Built
from cairn.engine.placement import check_devices
from cairn.engine.planned_step import Limits
from cairn.engine.ranks import Ranks
from cairn.errors import BadConfig, EngineDead, InvariantError
from cairn.models.decoder import Decoder
from cairn.models.registry import load_spec
from cairn.models.sharding import divide, local
from cairn.runner.orders import OrderReader, OrderWriter
from cairn.runner.step import DecodeWork, RowOpen, RowWork, StepPlan
from cairn.types import Grammar, SamplingParams
from tests import seeing
from tests.engine import children, dsv4, ranked, test_images
from tests.engine.fakes import all_pages_back
from tests.engine.harness import GOLDENS, assert_same, greedy, occupy, run, text, trace
from tests.engine.test_families import FAMILIES
from tests.models import quantised
from tests.support import shows

SIZES = {
    "vocab_size": 301,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "eos_token_id": 300,
}
DENSE = {
    "llama": {"attention_bias": True},
    "mistral": {"sliding_window": 50},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 24, "tie_word_embeddings": False},
    "gemma3_text": {"head_dim": 32, "query_pre_attn_scalar": 20, "sliding_window": 50},
}
LANDMARKS = "landmarks and windows"
OUTPUT = 5


KV_HEAD = "landmarks, one KV head"
CASES = [*FAMILIES, KV_HEAD]


def built(family: str, size: int, tmp_path: Path, **options):
    folder = GOLDENS / "qwen_hope_formula_nolmkq" if family == KV_HEAD else FAMILIES[family]
    if folder is None:
        (tmp_path / "config.json").write_text(json.dumps(dsv4.CONFIG), encoding="utf-8")
        folder, options = tmp_path, options | {"load_format": "random", "page_size": dsv4.PAGE}
    return ranked.engine(folder, size, **options)


@shows("hils qwen3_moe qwen3_next qwen3_5 glm_moe_dsa deepseek_v32 deepseek_v4", "TP")
@pytest.mark.parametrize("family", CASES)
def test_two_ranks_give_what_one_gives(family: str, tmp_path: Path) -> None:
    rng = random.Random(3)
    alone, core = built(family, 1, tmp_path), built(family, 2, tmp_path).core
    vocab, base = alone.spec.vocab_size, text(1, 90, alone.spec.vocab_size)
    # The last prompt finds a part of the first in the prefix cache.
    prompts = [base, text(2, 7, vocab), [*base[:70], 3]]
    live = []
    while len(live) < len(prompts) or core.has_work:
        if len(live) < len(prompts) and (rng.random() < 0.3 or not core.has_work):
            live.append(core.add(f"r{len(live)}", prompts[len(live)], greedy(OUTPUT, True)))
        core.scheduler.limits = Limits(4, rng.choice([3, 40, 1000]))
        core.step()
        check(core.cache, [r.lease for r in core.scheduler.running if r.lease is not None])
    for continuation, wanted in zip(live, run(alone, prompts, greedy(OUTPUT, True)), strict=True):
        assert_same(trace(continuation, vocab), wanted)
    assert all_pages_back(core)


def dense(family: str, size: int, folder: Path, **options):
    config = {"model_type": family} | SIZES | DENSE[family]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return ranked.engine(folder, size, load_format="random", **options)


@shows("llama mistral qwen2 qwen3 gemma3", "TP")
@pytest.mark.parametrize("family", DENSE)
def test_two_ranks_of_a_dense_model(family: str, tmp_path: Path) -> None:
    options = {"quantization": "fp8"} if family == "qwen3" else {}
    one, two = (dense(family, size, tmp_path, **options) for size in (1, 2))
    prompts = [text(1, 70, 300), text(2, 3, 300)]
    found, wanted = (
        run(each, prompts, greedy(3, True), [50], poisoned=False) for each in (two, one)
    )
    for mine, its in zip(found, wanted, strict=True):
        assert_same(mine, its)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "landmarks"])
def test_more_ranks_than_kv_heads(family: str, tmp_path: Path) -> None:
    prompts = [text(1, 70), text(2, 3)]
    make = dense if family in DENSE else built
    found = [
        run(make(family, size, tmp_path), prompts, greedy(3, True), [50], poisoned=False)
        for size in (4, 1)
    ]
    for mine, its in zip(*found, strict=True):
        assert_same(mine, its)


def test_rank_0_alone_chooses(tmp_path: Path) -> None:
    """Drafts, sampling, penalties, masks and selection reports, with overlap."""
    params = [
        SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, selection=True),
        SamplingParams(max_tokens=8, seed=1, ignore_eos=True, presence_penalty=1.0),
        SamplingParams(max_tokens=8, seed=2, grammar=Grammar("regex", "[ab]+")),
    ]
    options = {"speculative_algorithm": "NGRAM", "max_num_seqs": 4}
    found = []
    for size in (1, 2):
        engine = ranked.engine(children.MODEL, size, **options)
        core, core.overlap = engine.core, True
        prompt = [5, 6, 7, 8] * 20
        live = [core.add(f"r{i}", prompt[i:], param) for i, param in enumerate(params)]
        while core.has_work:
            core.step()
        assert core.scheduler.drafts.drafted > 0
        outputs = [continuation.stream.output for continuation in live]
        read = [[layer.pages for layer in token] for token in outputs[0].selection or []]
        found.append(([output.token_ids for output in outputs], read))
    assert found[0] == found[1]
    assert found[0][1]


@pytest.mark.parametrize(
    "family", ["recurrent", pytest.param("latent, shared selections", marks=pytest.mark.slow)]
)
def test_a_draft_layer_is_divided_too(family: str, tmp_path: Path) -> None:
    options = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 2}
    one, two = (built(family, size, tmp_path, load_format="random", **options) for size in (1, 2))
    prompts = [text(1, 70, one.spec.vocab_size), text(2, 5, one.spec.vocab_size)]
    found, wanted = (run(each, prompts, greedy(8), [40], poisoned=False) for each in (two, one))
    for mine, its in zip(found, wanted, strict=True):
        assert_same(mine, its)
    assert two.core.scheduler.drafts.drafted > 0


def test_records_of_all_ranks_come_back_from_host_memory(tmp_path: Path) -> None:
    core = built(LANDMARKS, 2, tmp_path, kv_host_memory="8MiB").core
    alone = built(LANDMARKS, 1, tmp_path)
    prompt = text(1, 4 * core.cache.slots.tokens_per_page + 3, alone.spec.vocab_size)
    for cached in (False, True):
        live = core.add(f"cached {cached}", prompt, greedy(OUTPUT))
        while core.has_work:
            core.step()
        assert bool(live.request.cached) == cached
        assert_same(trace(live, alone.spec.vocab_size), run(alone, [prompt], greedy(OUTPUT))[0])
        core.cache.close(occupy(core.cache, 0))
        assert core.cache.num_cached == 0


def same(one: Built, other: Built, prompts: list[list[int]]) -> None:
    found = [run(each, prompts, greedy(3, True), poisoned=False) for each in (one, other)]
    for mine, its in zip(*found, strict=True):
        assert_same(mine, its)


@pytest.mark.parametrize(
    "form",
    [
        "gptq 4",
        *(
            pytest.param(form, marks=pytest.mark.slow)
            for form in quantised.FORMATS
            if form not in ("gptq 4", "gptq act order")
        ),
    ],
)
def test_quantised_matrices_are_divided(form: str, tmp_path: Path) -> None:
    """Also experts, divided and whole."""
    width = {"intermediate_size": 128}
    for number, config in enumerate((quantised.DENSE | width, quantised.MOE | width)):
        folder, _ = quantised.folders(tmp_path / str(number), config, form)
        shared = [{}, {"enable_expert_parallel": True}][: 1 + number]
        one = ranked.engine(folder, 1, page_size=16)
        for more in shared:
            same(ranked.engine(folder, 2, page_size=16, **more), one, [text(1, 40, 60)])


def test_groups_of_columns_that_a_division_cuts_are_named(tmp_path: Path) -> None:
    for form, message in (
        ("awq", "the 96 columns of model.layers.0.mlp.down_proj are in groups of 32"),
        ("gptq act order", "the 64 columns of model.layers.0.self_attn.o_proj are in act order"),
    ):
        folder, _ = quantised.folders(tmp_path / form, quantised.DENSE, form)
        with torch.device("meta"):
            own, whole = (
                Decoder(spec, torch.float32, group)
                for spec, group in (
                    (local(load_spec(folder), 2), Group(0, 2)),
                    (load_spec(folder), ALONE),
                )
            )
        with pytest.raises(BadConfig, match=message):
            divide(own, whole)


@shows("qwen3_5_moe", "TP", "EP")
def test_a_hybrid_with_experts_is_divided_either_way(tmp_path: Path) -> None:
    folder = GOLDENS.parent / "qwen35" / "q35_moe_3to1"
    one = ranked.engine(folder, 1)
    prompts = [text(1, 70, one.spec.vocab_size), text(2, 3, one.spec.vocab_size)]
    for more in ({}, {"enable_expert_parallel": True}):
        same(ranked.engine(folder, 2, **more), one, prompts)


def test_ranks_share_out_images(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2}
    folder = seeing.write(tmp_path, **heads)
    given = test_images.prompt(5, test_images.image(1), 30, test_images.image(2, 48, 48), 4)
    found = []
    for size in (1, 2):
        options = {"load_format": "random", "page_size": 16, "limit_mm_per_prompt": None}
        built = ranked.engine(folder, size, **options)
        # The second time they are found in the prefix cache.
        for _ in range(2):
            live = test_images.start(built, given, 3)
            while built.core.has_work:
                built.core.step()
            found.append(trace(live, built.spec.vocab_size))
        assert built.runner.encoder is not None
        assert built.runner.encoder.encoded == 3 - size
    assert [bool(each.cached) for each in found] == [False, True, False, True]
    assert all(test_images.same(each, found[0]) for each in found)


def test_ranks_that_disagree_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    group, x = Group(0, 2), torch.randn(3, 5)
    other = x.clone()
    monkeypatch.setattr(group, "gathered", lambda own: torch.stack((own, hashes.pop())))
    # The computations of the other rank.
    hashes: list[torch.Tensor] = []
    far = Group(1, 2)
    monkeypatch.setattr(far, "gathered", lambda own: (hashes.append(own), own[None])[1])
    group.checks = far.checks = True
    far.expect_equal("x", other)
    group.expect_equal("x", x)
    other[2, 1] = -other[2, 1]
    far.expect_equal("x", other)
    with pytest.raises(InvariantError, match=r"x \[3, 5\] differ between ranks"):
        group.expect_equal("x", x)


def test_sizes_that_cannot_be_divided_are_refused() -> None:
    spec = load_spec(GOLDENS / "qwen_gqa4_prior_lora_inrange")
    with pytest.raises(BadConfig, match=r"tensor_parallel_size is 3, but .* one of 1, 2, 4, 8$"):
        local(spec, 3)


def test_ranks_take_a_gpu_each(monkeypatch) -> None:
    config = resolve(
        EngineOptions(tensor_parallel_size=2, device="cuda:2"),
        load_spec(children.MODEL),
        Machine(True, True, 1 << 30),
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    check_devices(config)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(BadConfig, match="there are 1 GPUs from cuda:2 on"):
        check_devices(config)


def test_orders_come_as_they_went_and_none_is_missed() -> None:
    writer, reader = OrderWriter(), OrderReader()
    work = RowWork(0, 4, [1, 2, 3], True, drafts=1)
    opened = RowOpen(0, "a", SamplingParams(prompt_logprobs=2, top_k=3), 5, history=[1, 2])
    plan = StepPlan(7, (1,), (opened,), (), (work,), DecodeWork.of([2], [30], [4]), [0])
    found = reader.read(writer.step(plan)).plan
    assert found.work[0].tokens == [1, 2, 3]
    assert [column.tolist() for column in found.decode[:3]] == [[2], [30], [4]]
    # Other ranks do not take part in sampling.
    assert found.opened[0].params == SamplingParams(temperature=0, prompt_logprobs=2)
    assert not found.opened[0].history
    writer.step(plan)
    with pytest.raises(InvariantError, match="order 3 came in the place of 2"):
        reader.read(writer.call("forget_reads", {}))


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("sleep 60", "rank 1 has not reported in 0 s; the others: rank 0 at start"),
        ("false", r"rank 1 \(cpu\) ended with exit code 1"),
    ],
)
def test_a_rank_that_does_not_come_is_named(command, reason, monkeypatch) -> None:
    def spawn(self, seat, host, device):
        process = object.__new__(module.RankProcess)
        process.rank, process._device = seat.rank, device
        process.process = subprocess.Popen(command.split(), stdin=subprocess.PIPE)
        return process

    monkeypatch.setattr(Ranks, "_spawn", spawn)
    monkeypatch.setattr(module, "START", timedelta(seconds=0.3 if "sleep" in command else 30))
    monkeypatch.setattr(module, "GRACE", 0.1)
    with pytest.raises(EngineDead, match=reason):
        Ranks(2, torch.device("cpu"))


def test_a_rank_that_is_killed_ends_the_engine(tmp_path: Path) -> None:
    """The last test of the module, because it kills the ranks that the others share."""
    core, told = built(LANDMARKS, 2, tmp_path).core, []
    ranks = ranked.ranks(2)
    ranks._on_death = told.append
    live = core.add("r", [1, 2, 3], greedy(20))
    core.step()
    ranks._local[0].process.kill()
    killed = "the process of rank 1 (cpu) was killed by SIGKILL"
    with pytest.raises(EngineDead, match=re.escape(killed)):
        while core.has_work:
            core.step()
    assert live.error.startswith(f"the step failed: {killed}") and live.status == 503
    assert all_pages_back(core)
    assert "SIGKILL" in str(told)
    ranked.ranks.cache_clear()


def test_gpus_of_ranks_are_taken_in_order() -> None:
    named = [str(module.device_of(torch.device(first), 1)) for first in ("cpu", "cuda", "cuda:2")]
    assert named == ["cpu", "cuda:1", "cuda:3"]
