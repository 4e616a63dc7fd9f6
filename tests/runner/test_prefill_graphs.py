"""Steps with prefills as CUDA graphs, compared with eager steps; first with the CPU acting as a
GPU."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cairn import SamplingParams
from cairn.attention import base
from cairn.attention.cuts import UNCHUNKED, WHOLE, Cuts, Front, alone
from cairn.cache.landmarks import SlotMap
from cairn.cache.pools import CachePools
from cairn.engine import build
from cairn.engine.build import Built
from cairn.engine.warmup import warm_up
from cairn.runner import prefill_graphs
from cairn.runner.graphs import DecodeGraphs, Place
from cairn.runner.prefill_graphs import (
    MORE_PAGES,
    MOST,
    Kind,
    PrefillGraphs,
    buckets_up_to,
    worthwhile,
)
from cairn.runner.rows import Layout, Rows
from cairn.runner.step import DecodeWork, PageGrant, RowWork, StepPlan
from tests.engine.harness import assert_same, engine, greedy, run, text
from tests.runner.playing import LANDMARK, MAX_PAGES, Model, NoBackends, check_batch

SIZE = 4


@pytest.mark.parametrize("most", [1, 16, 17, 100, 1024, MOST])
def test_buckets_reach_and_waste_little(most):
    found = buckets_up_to(most)
    assert list(found) == sorted(set(found))
    assert found[-1] >= most and all(bucket < most for bucket in found[:-1])
    assert all(bucket % 16 == 0 for bucket in found)
    assert all(b - a <= max(16, b // (5 if b <= 512 else 9)) for a, b in itertools.pairwise(found))


def rows_of(num_rows: int, landmarks: bool = True, groups: int = 1) -> Rows:
    slots = SlotMap(SIZE, landmarks)
    return Rows(num_rows, MAX_PAGES, slots, LANDMARK, torch.device("cpu"), groups)


def graphs_of(
    device: Rows,
    model: Model,
    spare: tuple[int, ...] = (999,),
    backends: NoBackends | None = None,
    most: int = MOST,
) -> PrefillGraphs:
    place = Place(backends or NoBackends(), device, spare)
    return PrefillGraphs(DecodeGraphs(model, place, len(device.page_tables[0])), most)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("landmarks", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3, 20])
def test_steps_one_after_the_other(no_gpu, num_rows, landmarks, groups):
    """Chunks of any length next to decoding rows: the graph reads the layout, also from its own
    page tables, and padding that belongs to no row."""
    rng = random.Random(num_rows)
    # The host's layout, and the device's tables.
    rows, device = (rows_of(num_rows, landmarks, groups) for _ in range(2))
    slots, tables, many = rows.slots, device.tables, num_rows * MAX_PAGES
    device.last_token += torch.arange(num_rows + 1) + 100
    spare = (many, many + 1)[:groups]
    model, backends = Model(), NoBackends()
    graphs = graphs_of(device, model, spare, backends, most=100)
    replayed = 0
    for step in range(60):
        grants, works, decoding = [], [], []
        for r in sorted(rng.sample(range(num_rows), rng.randint(1, num_rows))):
            first = rng.randrange(20 * (SIZE - 1))
            count = rng.choice([1, 2, 9, rng.randint(1, 60)])
            need = int(slots.pages_for(first + count))
            pages = tuple(rng.randrange(many) for _ in range(need))
            behind = tuple(page + 1 for page in pages[-20:]) if groups > 1 else ()
            grants.append(PageGrant(r, 0, pages, behind))
            if count == 1:
                decoding.append((r, first))
            else:
                works.append(RowWork(r, first, [rng.randrange(20) for _ in range(count)], True))
        decode = DecodeWork.of(
            *([pair[i] for pair in decoding] for i in (0, 1)), [0] * len(decoding)
        )
        layout = rows.lay_out(StepPlan(step, (), (), tuple(grants), tuple(works), decode))
        before = tables.clone()
        hidden = graphs.run(layout)
        if hidden is None:
            assert torch.equal(tables, before)
            tables.view(-1)[torch.from_numpy(layout.grants.cells)] = torch.from_numpy(
                layout.grants.pages
            )
            continue
        replayed += 1
        assert hidden.tolist() == [
            [7.0 * s + r] for s, r in zip(layout.slot, layout.arrays.row, strict=True)
        ]
        check_batch(model.batch, layout, device.last_token.numpy(), spare)
        cuts = backends.cuts
        assert cuts.chunked == (len(layout.slot) >= 16 * len(layout.start))
        beside = len(decoding) if works and cuts.chunked else 0
        assert cuts.alone == alone(beside, len(model.batch.slot))
        assert torch.equal(tables[:-1], rows.tables[:-1])
    assert replayed > 10


def lay_out(rows: Rows, first: int, count: int, decoding: int = 0) -> Layout:
    """A late chunk, in the row after the decoding ones."""
    need = int(rows.slots.pages_for(first + count))
    grants = (PageGrant(decoding, 0, tuple(range(need))),)
    works = (RowWork(decoding, first, [1] * count, True),)
    decode = DecodeWork.of(range(decoding), [60] * decoding, [0] * decoding)
    return rows.lay_out(StepPlan(0, (), (), grants, works, decode))


def test_steps_that_fit_no_graph_run_eagerly(no_gpu):
    rows = rows_of(2)
    graphs = graphs_of(rows, Model(), backends=NoBackends(longest_in_graphs=24), most=40)
    assert graphs.buckets == (16, 32, 48)
    for first, count, fits in (
        (0, 18, True),  # slots 0 .. 23
        (0, 19, False),  # one too many for a row
        (9, 9, True),
        (9, 10, False),
    ):
        layout = lay_out(rows, first, count)
        assert (graphs.run(layout) is not None) == fits, (first, count)
    free = graphs_of(rows, Model(), most=40)
    assert free.run(lay_out(rows, 3, 31)) is not None
    assert free.run(lay_out(rows, 0, 37)) is None  # 49 slots
    assert free.run(lay_out(rows, 0, 37)) is None


@pytest.mark.parametrize("near", [False, True])
def test_early_chunks_have_graphs_of_their_own(near, no_gpu, monkeypatch):
    """Chunks from a row's start, and chunks that are early as a whole."""
    monkeypatch.setattr("cairn.attention.cuts.MIN_EARLY", 16)
    limits = [Front(32, 8), *([Front(320, 80)] if near else [])]
    rows, model, backends = rows_of(40), Model(), NoBackends(limits)
    graphs = graphs_of(rows, model, backends=backends, most=600)
    every = graphs.kinds()
    assert len(set(every)) == len(every)
    assert not any(kind.cuts.fronts for kind in every if not kind.cuts.chunked)

    def fronts(slots: int, alone: int) -> set[tuple[tuple[int, ...], ...]]:
        return {k.cuts.fronts for k in every if (k.slots, k.cuts.alone) == (slots, alone)}

    # At least one row decodes where 16 are apart, 17 where 64 are: others are of the chunk behind.
    behind = ((288, 80),) if near else ()
    assert fronts(320, 0) == {(), ((32, 8), *behind), ((320, 8),)}
    assert fronts(320, 16) == {(), ((16, 8), *behind), ((304, 8),)}
    assert fronts(320, 64) == {(), *([((256, 80),)] if near else []), ((256, 8),)}
    assert fronts(16, 0) == {(), ((16, 8),)}
    assert fronts(640, 0) == {(), ((32, 8),), ((640, 8),)}
    for first, count, early in (
        *((0, 18, 32), (0, 24, 32), (6, 18, 32), (6, 19, 0), (100, 18, 0)),
        *((0, 25, 32), (0, 110, 32)),
    ):
        assert graphs.run(lay_out(rows, first, count)) is not None
        assert backends.cuts.fronts[:1] == (((early, 8),) if early else ()), (first, count)
    # The last one is not a step of chunks.
    for decoding, early in ((1, 16), (5, 16), (9, 16), (15, 0)):
        layout = lay_out(rows, 0, 118, decoding)
        assert graphs.run(layout) is not None
        assert backends.cuts.fronts[:1] == (((early, 8),) if early else ()), decoding
        begin = backends.cuts.alone
        for front in backends.cuts.fronts:
            limit = next(limit.slots for limit in limits if limit.pages == front.pages)
            assert (layout.slot[begin : begin + front.slots] < limit).all()
            begin += front.slots
    assert set(graphs._captured) <= set(every)


class Onlooker(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_dispatch_modes_see_every_op(no_gpu):
    rows = rows_of(1)
    graphs = graphs_of(rows, Model())
    layout = lay_out(rows, 0, 20)
    graphs.run(layout)
    with Onlooker():
        assert graphs.run(layout) is None
    assert graphs.run(layout) is not None
    with Onlooker():
        assert graphs.run(layout) is None


def test_a_step_that_completes_too_many_pages_fits_none(no_gpu):
    count = 3 * MORE_PAGES
    rows = rows_of(count)
    graphs = graphs_of(rows, Model())
    for closing, fits in ((count, False), (MORE_PAGES, True)):
        first = [2 if r < closing else 1 for r in range(count)]
        grants = tuple(PageGrant(r, 0, (r,)) for r in range(count))
        decode = DecodeWork.of(range(count), first, [0] * count)
        layout = rows.lay_out(StepPlan(0, (), (), grants, (), decode))
        assert len(layout.arrays.completed) == closing
        assert (graphs.run(layout) is not None) == fits


def test_kinds_come_with_the_largest_first(no_gpu):
    rows = rows_of(1)
    graphs = graphs_of(rows, Model())
    kinds = graphs.kinds()
    assert kinds[0] == Kind(MOST, Cuts(True))
    assert {kind.slots for kind in kinds} == set(graphs.buckets)
    assert next(kind.slots for kind in kinds if kind.cuts == WHOLE) == UNCHUNKED
    # Next to a row with a prefill there is none.
    assert not any(kind.cuts.alone for kind in kinds)
    rows = rows_of(18)
    graphs = graphs_of(rows, Model())
    kinds = graphs.kinds()
    assert [kind.cuts.alone for kind in kinds if kind.slots == 512] == [0, 16, 64]
    # 128 slots are chunks of at most eight rows.
    assert [kind.cuts.alone for kind in kinds if kind.slots == 128] == [0, 16, 0]
    assert [kind.cuts.alone for kind in kinds if kind.slots == 16] == [0, 0]
    assert len(set(kinds)) == len(kinds)


def test_a_graph_that_memory_does_not_hold_is_done_without(no_gpu, monkeypatch, caplog):
    rows, device = rows_of(1), rows_of(1)
    tables = device.tables
    graphs = graphs_of(device, Model())
    tried, fitting = [], prefill_graphs.capture

    def capture(run, pool, group):
        tried.append(run.args[0].slots)
        if tried[-1] > 32:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return fitting(run, pool, group)

    monkeypatch.setattr(prefill_graphs, "capture", capture)
    large, small = lay_out(rows, 0, 30), lay_out(rows, 0, 18)
    graphs.run(large)
    graphs.run(small)
    before = tables.clone()
    for _ in range(3):
        assert graphs.run(large) is None
    assert torch.equal(tables, before)
    assert graphs.run(small) is not None
    assert tried == [48, 32]
    assert [r.message for r in caplog.records] == [
        "steps of 48 slots run without a graph: CUDA out of memory"
    ]


def with_a_spare_page(schema, sizes, device, spare) -> CachePools:
    return CachePools(schema, sizes, device, True)


@pytest.mark.parametrize(
    "case",
    [
        "olmo_mha_interleave4",
        "qwen_gqa4_prior_lora_inrange",
        pytest.param("qwen_c64", marks=pytest.mark.slow),
    ],
)
def test_an_engine_whose_steps_are_graphs(no_gpu, monkeypatch, case):
    """Chunks of all sizes, decoding rows next to them, prompt log-probabilities: as without
    graphs."""
    with monkeypatch.context() as patched:
        patched.setattr(build, "CachePools", with_a_spare_page)
        graphs = engine(case, enable_prefix_caching=False)
    plain = engine(case, enable_prefix_caching=False)
    assert graphs.runner.prefill_graphs is not None and plain.runner.prefill_graphs is None
    check_schedules(graphs, plain, graphs.runner.prefill_graphs.buckets[:6])


@pytest.mark.parametrize("case", ["qwen_gqa4_prior_lora_inrange", "olmo_mha_interleave4"])
def test_rows_that_decode_beside_chunks_that_are_cut_into_tiles(no_gpu, monkeypatch, case):
    with monkeypatch.context() as patched:
        patched.setattr(build, "CachePools", with_a_spare_page)
        graphs = engine(case, enable_prefix_caching=False)
    plain = engine(case, enable_prefix_caching=False)
    attend_in_parts, counts = base.attend_in_parts, set()

    def count_parts(batch, cuts, segments, attend, **kinds):
        parts = []

        def noted(part):
            parts.append(part)
            return attend(part)

        out = attend_in_parts(batch, cuts, segments, noted, **kinds)
        counts.add(len(parts))
        return out

    monkeypatch.setattr(base, "attend_in_parts", count_parts)
    rng = random.Random(5)
    prompts = [text(i, rng.choice([3, 20, 150, 260, 330])) for i in range(7)]
    params = [greedy(rng.choice([3, 25])) for _ in prompts]
    got, wanted = (run(built, prompts, params, (160, 301, 140)) for built in (graphs, plain))
    for one, other in zip(got, wanted, strict=True):
        assert_same(one, other)
    assert counts == {1, 2}


def check_schedules(graphs: Built, plain: Built, buckets) -> None:
    for seed, budgets in enumerate(((), (40,), (7, 100, 33))):
        rng = random.Random(seed)
        size = plain.config.page_size
        prompts = [text(seed + i, rng.choice(buckets) - rng.randrange(5)) for i in range(5)]
        params = [
            greedy(size + i, prompt_logprobs=i % 2 == 0)
            if i < 4
            else SamplingParams(temperature=0.7, seed=i, max_tokens=9, logprobs=-1)
            for i in range(5)
        ]
        got, wanted = (run(built, prompts, params, budgets) for built in (graphs, plain))
        for one, other in zip(got, wanted, strict=True):
            assert_same(one, other)
    assert graphs.runner.prefill_graphs._captured


def test_models_with_more_weights_have_smaller_graphs():
    """A selecting layer counts as two."""
    assert worthwhile(358_584_320, 2 * 16) == MOST
    assert 4096 < worthwhile(358_584_320, 16) < MOST
    assert 512 < worthwhile(7_314_800_000, 24 + 2 * 8) <= 576
    assert worthwhile(10**12, 80) == 16


@pytest.mark.parametrize("options, counted", [({}, 1), ({"attention_backend": "window"}, 0)])
def test_layers_that_select_count_twice_in_an_engine(monkeypatch, options, counted):
    """Layers that are computed as plain windows do not."""
    heard = []
    monkeypatch.setattr(build, "worthwhile", lambda *given: heard.append(given) or 32)
    built = engine("qwen_gqa4_prior_lora_inrange", **options)
    selecting = [mixer.selects for mixer in built.spec.mixers]
    assert any(selecting) == bool(counted)
    ((weights, layers),) = heard
    assert weights > 0 and layers == built.spec.num_layers + sum(selecting)
    assert built.runner.shape.graph_slots == 32


@pytest.fixture(scope="module", params=["qwen_gqa4_prior_lora_inrange", "olmo_mha_interleave4"])
def pair(request) -> tuple[Built, Built]:
    options = {"kv_cache_memory": "96MiB", "device": "cuda", "enable_prefix_caching": False}
    graphs = engine(request.param, **options)
    for kind in graphs.runner.prefill_graphs.kinds():
        graphs.runner.prefill_graphs.prepare(kind)
    return graphs, engine(request.param, disable_cuda_graph=True, **options)


@pytest.mark.gpu
def test_on_a_gpu(pair):
    graphs, plain = pair
    check_schedules(graphs, plain, graphs.runner.prefill_graphs.buckets[:10])


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [None, 300])
def test_prompts_of_every_other_bucket(pair, chunk):
    """Alone, and in chunks next to decoding rows."""
    graphs, plain = pair
    buckets, longest = graphs.runner.prefill_graphs.buckets, graphs.memory.max_model_len
    for i, bucket in enumerate(bucket for bucket in buckets[::2] if bucket <= longest):
        prompts = [text(i, bucket - bucket // 16 - i % 3), text(i + 50, 20)]
        budgets = () if chunk is None else (chunk,)
        got, wanted = (run(built, prompts, greedy(3), budgets) for built in (graphs, plain))
        for one, other in zip(got, wanted, strict=True):
            assert_same(one, other)


@pytest.mark.gpu
def test_graphs_of_one_pool_do_not_disturb_each_other(pair):
    """Prefills of all sizes in turn, with decode steps of several endings between them."""
    graphs, plain = pair
    rng = random.Random(3)
    for _ in range(12):
        lengths = [rng.choice([3, 40, 130, 400, 900]) for _ in range(rng.randint(1, 4))]
        prompts = [text(rng.randrange(1000), n) for n in lengths]
        params = replace(greedy(8), logprobs=None) if rng.random() < 0.5 else greedy(8)
        got, wanted = (run(built, prompts, params) for built in (graphs, plain))
        for one, other in zip(got, wanted, strict=True):
            assert one.tokens == other.tokens
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-4)


@pytest.mark.gpu
def test_an_engine_that_was_idle_for_long_captures_nothing_more():
    built = engine("qwen_gqa4_prior_lora_inrange", device="cuda", kv_cache_memory="64MiB")
    warm_up(built)
    decoding, prefilling = built.runner.graphs, built.runner.prefill_graphs
    assert {min(prefilling.buckets), max(prefilling.buckets)} <= {
        kind.slots for kind in prefilling._captured
    }
    few = len(decoding._captured), len(prefilling._captured)
    while decoding.prepare_next() or prefilling.prepare_next():
        pass
    known = set(prefilling._captured) | set(decoding._captured)
    assert set(prefilling.kinds()) <= known
    assert few < (len(decoding._captured), len(prefilling._captured))
    run(built, [text(1, 700), text(2, 30)], replace(greedy(3), logprobs=None))
    assert set(prefilling._captured) | set(decoding._captured) == known


@pytest.mark.gpu
def test_a_device_without_memory_for_graphs_serves_without():
    options = {"kv_cache_memory": "96MiB", "device": "cuda", "enable_prefix_caching": False}
    graphs = engine("qwen_gqa4_prior_lora_inrange", **options)
    plain = engine("qwen_gqa4_prior_lora_inrange", disable_cuda_graph=True, **options)
    prompts, params = [text(5, 700), text(6, 300)], greedy(6)
    wanted = run(plain, prompts, params)
    refused, decoding = graphs.runner.prefill_graphs, graphs.runner.graphs
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    try:
        for kind in refused.kinds():
            refused.prepare(kind)
        for kind in decoding.kinds():
            decoding._graph(kind)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert refused._too_large == set(refused.kinds()) and decoding._too_large
    for _ in range(3):
        for one, other in zip(run(graphs, prompts, params), wanted, strict=True):
            assert_same(one, other)
    assert not refused._captured
