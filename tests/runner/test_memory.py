"""The measured steps are the largest ones that can occur, in rows and pages."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from cairn import LLM, SamplingParams
from cairn.attention.registry import cache_schema
from cairn.cache.landmarks import SlotMap
from cairn.cache.pools import CachePools, PoolSizes
from cairn.engine.build import page_format
from cairn.errors import OutOfMemory
from cairn.ops import gpu as gpu_ops
from cairn.ops.compile_cache import cache_path
from cairn.runner import memory
from cairn.runner.memory import PAGES, Measured, Steps, decode_step, prefill_step
from cairn.runner.runner import Runner, RunnerShape
from tests.engine.harness import GOLDENS, engine

SIZE = 16
gpu = pytest.mark.gpu
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def shape(rows: int, longest: int, *, landmarks: bool = True) -> RunnerShape:
    slots = SlotMap(SIZE, landmarks)
    return RunnerShape(rows, slots.pages_for(longest), 100, slots, graph_slots=64)


def slots_of(shape: RunnerShape, plan) -> int:
    count = shape.slots.slots_for
    works = plan.row_by_row()
    return sum(count(work.first + work.num_tokens) - count(work.first) for work in works)


@pytest.mark.parametrize("landmarks", [True, False])
@pytest.mark.parametrize(
    ("rows", "longest", "slots", "used"),
    [(4, 1000, 64, 1), (4, 1000, 2000, 2), (3, 50, 1000, 3), (1, 1, 8, 1), (2, 10, 1, 1)],
)
def test_a_prefill_step_is_full(rows, longest, slots, used, landmarks):
    where = shape(rows, longest, landmarks=landmarks)
    plan = prefill_step(where, Steps(slots, longest, graphs=False), targets=30)
    assert [len(work.prompt_targets) for work in plan.work] == [
        min(30, plan.work[0].num_tokens - 1), *[0] * (used - 1)
    ]  # fmt: skip
    assert len(plan.work) == len(plan.opened) == len(plan.grants) == used
    full = used * where.slots.slots_for(longest)
    # A landmark may complete a chunk, as in the scheduler's steps; one token fewer may fit.
    assert abs(slots_of(where, plan) - min(slots, full)) <= 1
    for work, grant in zip(plan.work, plan.grants, strict=True):
        assert work.first >= 0 and work.first + work.num_tokens == longest
        assert len(grant.pages) == where.slots.pages_for(longest) <= where.max_pages
        assert set(grant.pages) <= set(range(PAGES))


@pytest.mark.parametrize(("rows", "slots", "used"), [(4, 640, 4), (8, 9, 5), (3, 1, 1), (1, 99, 1)])
def test_prefill_steps_spread_over_all_rows(rows, slots, used):
    where = shape(rows, 1000)
    plan = prefill_step(where, Steps(slots, 1000, graphs=False), spread=True)
    assert used <= len(plan.work) <= rows
    assert abs(slots_of(where, plan) - slots) <= rows
    counts = [work.num_tokens for work in plan.work]
    assert max(counts[:-1], default=0) - min(counts[:-1], default=0) <= 1


@pytest.mark.parametrize("longest", [1, 14, 15, 16, 31, 1000])
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_a_decode_step_runs_every_row(rows, longest):
    where = shape(rows, longest)
    eager = decode_step(where, longest, eager=True)
    whole = decode_step(where, longest, eager=False)
    small = decode_step(where, longest, eager=False, rows=1)
    closes = longest >= 15
    assert slots_of(where, eager) == rows * (1 + closes)
    assert slots_of(where, whole) == rows * (1 + closes)
    assert slots_of(where, small) == 1
    for plan, tokens in ((eager, [0]), (whole, None), (small, None)):
        assert all(work.tokens == tokens for work in plan.row_by_row())
        assert all(0 <= work.first < longest for work in plan.row_by_row())


@pytest.mark.parametrize("case", ["qwen_gqa4_prior_lora_inrange", "olmo_mha_interleave4"])
def test_a_runner_takes_them(case):
    built = engine(case)
    mixers, shape, device = built.spec.mixers, built.runner.shape, torch.device("cpu")
    schema = cache_schema(mixers, page_format(built.config))
    sizes = PoolSizes((PAGES,) * len(schema.groups), shape.num_rows)
    pools = CachePools(schema, sizes, device)
    for tensor in pools.tensors():
        tensor.zero_()
    runner = Runner(built.runner.model, mixers, pools, shape, device)
    longest = built.memory.max_model_len
    steps = Steps(200, longest, graphs=False)
    for plan in (
        prefill_step(runner.shape, steps),
        decode_step(runner.shape, longest, eager=True),
        decode_step(runner.shape, longest, eager=False),
    ):
        result = runner.run(plan)
        assert len(result.tokens) == len(plan.row_by_row())
        assert all(token >= 0 for token in result.tokens)
        assert all(len(reported.ids) for reported in result.logprobs.values())


@pytest.mark.parametrize(
    ("case", "options", "ran"),
    [
        ("qwen_shared_qc", {}, {0, 2}),
        # Equal, except for the attention backend.
        ("qwen_shared_qc", {"hsa_layers": "1"}, {0, 1, 2}),
        ("olmo_mha_interleave4", {}, {0, 3, 7}),
    ],
)
def test_a_rehearsal_runs_a_block_of_each_kind_and_the_last(case, options, ran):
    built = engine(case, **options)
    runner, blocks = built.runner, built.runner.model.layers
    assert max(ran) == len(blocks) - 1
    seen = []
    for number, block in enumerate(blocks):
        block.register_forward_hook(lambda *given, number=number: seen.append(number))
    plan = prefill_step(runner.shape, Steps(40, built.memory.max_model_len, graphs=False))
    for tensor in runner.pools.tensors():
        tensor.zero_()
    runner.rehearse([plan])
    assert seen == sorted(ran)
    seen.clear()
    runner.launch(plan).result()
    assert seen == list(range(len(blocks)))


def test_measurements_are_cached(tmp_path, monkeypatch):
    """The next engine does not measure again, but counts the memory that stays in use."""
    cached, free = tmp_path / "cached.json", [100, 110, 100, 93, 93, 80]
    subjects: list[object] = []
    monkeypatch.setattr(
        memory, "cache_path", lambda subject, device: subjects.append(subject) or cached
    )
    monkeypatch.setattr(memory, "_free", lambda device: free.pop(0))
    monkeypatch.setattr(memory, "measure", lambda *given: Measured(5, 6))
    spec = SimpleNamespace(mixers=())
    given = (None, spec, "shape", "steps", "form", "device")
    assert memory.measured(*given) == Measured(5, 6, 0)
    # Another process freed memory meanwhile.
    assert not cached.exists()
    assert memory.measured(*given) == Measured(5, 6, 0)
    assert len(free) == 2
    assert memory.measured(*given) == Measured(5, 6, 7)
    assert len(free) == 2
    assert subjects == [(spec, "shape", "steps", "form")] * 3
    cached.write_text("{")
    assert memory.measured(*given) == Measured(5, 6, 0)
    assert memory.measured(*given).kept == 13


def test_a_note_is_of_its_subject_sources_and_device(tmp_path, monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr(gpu_ops, "cache_folder", lambda: tmp_path)
    first = cache_path(("a", 1), cpu)
    assert first is not None and first.parent == tmp_path
    assert cache_path(("a", 1), cpu) == first != cache_path(("a", 2), cpu)
    monkeypatch.setattr(gpu_ops, "version", lambda: "another")
    assert cache_path(("a", 1), cpu) != first
    monkeypatch.setattr(gpu_ops, "cache_folder", lambda: None)
    assert cache_path(("a", 1), cpu) is None


@gpu
@needs_cuda
@pytest.mark.parametrize("graphs", [True, False])
def test_steps_stay_within_the_planned_memory(graphs):
    """No later step needs more memory than the plan reserves."""
    llm = LLM(
        str(GOLDENS / "qwen_gqa4_prior_lora_inrange"), device="cuda", max_num_seqs=24,
        chunked_prefill_size=2048, disable_cuda_graph=not graphs,
    )  # fmt: skip
    table = dict(llm.engine.table)
    assert table["activations"] > 0
    assert graphs == (llm.engine.runner.graphs is not None)
    assert graphs or "graphs" not in table
    assert sum(table.values()) == torch.cuda.mem_get_info()[1]
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    # Not the allocated bytes: steps also use free memory between tensors that stay.
    held = torch.cuda.memory_reserved()
    longest = min(llm.max_model_len, 3000)
    prompts = [{"prompt_token_ids": [i % 97] * (longest - 140)} for i in range(24)]
    for temperature in (0.0, 1.0):
        params = SamplingParams(
            temperature=temperature, top_p=0.9, max_tokens=130, logprobs=3, ignore_eos=True
        )
        llm.generate(prompts, params, use_tqdm=False)
    # Memory of graphs is measured by the device's free memory, which other processes change, too.
    took = torch.cuda.max_memory_reserved() - held
    graph_bytes = max(table.get("graphs", 0), graphs * 256 << 20)
    assert took <= table["activations"] + graph_bytes


@gpu
@needs_cuda
def test_more_than_the_gpu_has_is_refused_with_what_would_fit():
    total = torch.cuda.mem_get_info()[1]
    with pytest.raises(OutOfMemory, match="--kv-cache-memory. to at most"):
        LLM(device="cuda", kv_cache_memory=total)
    with pytest.raises(OutOfMemory, match="--gpu-memory-utilization. to at least"):
        LLM(device="cuda", gpu_memory_utilization=0.001)
