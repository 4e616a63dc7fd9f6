import math

import pytest
import torch

from cairn.ops import gpu, grid_barrier
from cairn.ops.attention import launch
from cairn.ops.attention.tuning import TUNING as ATTENTION_TUNING
from cairn.ops.landmark import fused_launch, short_launch
from cairn.ops.landmark.kernels import fused
from cairn.ops.landmark.landmark_attention import landmark_attention
from cairn.ops.landmark.page_weights import shared_weights
from cairn.ops.landmark.select_task import short_pages
from cairn.ops.landmark.tuning import TUNING
from cairn.ops.testing import Make, check
from cairn.specs.kv_format import FP4_E2M1, FP8_E4M3
from tests.ops.attention.geometry import STEPS, draw, near, softmax_attention
from tests.ops.launches import as_if_pdl, on_hopper


def pages_and_window(case, token, head, window, chosen, scores, lse, softmax1):
    """The definition by loops, in float64: o of one head from its pages' scores and the lse."""
    kv, row, slot = head // case.group, int(case.row[token]), int(case.slot[token])
    q, scale = case.q[token, head].double(), case.dim**-0.5
    first = max(0, (slot - window + 1) // case.size * case.size)
    spans = [range(p * case.size, (p + 1) * case.size) for p in chosen]
    states = []
    for span in (*spans, range(first, slot + 1)):
        pairs = [case.key(row, t) for t in span if t % case.size != case.size - 1]
        keys, values = [k[kv] for k, _ in pairs], [v[kv] for _, v in pairs]
        states.append(softmax_attention(q, keys, values, scale)[0] if pairs else None)
    weights = [math.exp(x) for x in (*scores, lse)]
    total = sum(weights) + (1.0 if softmax1 else 0.0)
    o = torch.zeros(case.dim, dtype=torch.float64)
    for weight, state in zip(weights, states, strict=True):
        if state is not None:
            o += weight / total * state
    return o


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", ["reference", "composed"])
@pytest.mark.parametrize("softmax1", [False, True])
def test_is_one_softmax_over_pages_and_window(step, name, softmax1):
    case = draw(50 + STEPS.index(step), step)
    heads, window = case.heads * case.group, case.size + 2
    g = torch.Generator().manual_seed(3)
    z = torch.randn(case.row.numel(), heads, case.dim, generator=g)
    key = torch.randn(case.k_cache.shape[0], heads, case.dim, generator=g)
    o, indices, scores, lse = landmark_attention.using(name)(
        *(case.q, z, case.k_cache, case.v_cache, key, None, *case.where, window, 3, softmax1)
    )
    assert o.dtype == case.q.dtype
    for token in range(0, case.row.numel(), max(1, case.row.numel() // 4)):
        for head in range(heads):
            chosen = [p for p in indices[token, head // case.group].tolist() if p >= 0]
            mine = scores[token, head, : len(chosen)].tolist()
            given = (window, chosen, mine, float(lse[token, head]), softmax1)
            near(o[token, head], pages_and_window(case, token, head, *given), case.q.dtype)


def test_heads_that_share_a_score_share_a_softmax():
    scores = torch.tensor([[[0.0, 1.0]]])
    lse = torch.tensor([[2.0, 3.0]])
    weights, window = shared_weights(scores, lse, False)
    total = 1 + math.e + math.e**2 + math.e**3
    expected = torch.tensor([1 / total, math.e / total])
    torch.testing.assert_close(weights, expected.expand(1, 2, 2))
    torch.testing.assert_close(window, torch.full((1, 2), (math.e**2 + math.e**3) / total))


@pytest.fixture(params=["in turn", "whole"])
def launches(request, tuned):
    """Number of launches of a step of few tokens."""
    tuned(TUNING, fused_whole=0.0 if request.param == "whole" else math.inf)
    return request.param


@pytest.mark.skipif(not gpu.INTERPRETED, reason="needs Triton, and a machine without CUDA")
@pytest.mark.parametrize("stored", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    "chunk, short, listed, programs, compared",
    [
        (4, 256, 256, 512, 1 << 14),
        (4, 4, 256, 6, 0),
        (512, 8, 256, 12, 1 << 14),
        (16, 8, 256, 6, 1 << 14),
        (4, 4, 9, 512, 0),
    ],
)
def test_many_chunks_of_candidates_and_their_merge(
    chunk, short, listed, programs, compared, stored, launches, tuned, monkeypatch
):
    """The smallest chunks, which correspond to the longest contexts.

    Reading programs process one, two or all three selected pages each.
    """
    tuned(TUNING, fused_chunk=chunk)
    tuned(TUNING, fused_short_chunk=short)
    tuned(TUNING, fused_max_listed=listed)
    tuned(TUNING, page_split_programs=programs)
    monkeypatch.setattr(fused, "MAX_COMPARED", gpu.constant(compared))
    make = Make()
    paged = make.paged((176, 65, 121), 2, 8, 16)
    row, slot, _ = paged.queries((1, 1, 1))
    q, z = (make.randn(3, 4, 16) for _ in range(2))
    key, bias = make.randn(len(paged.k_cache), 4, 16), make.randn(len(paged.k_cache), 4)
    caches = (paged.k_cache, paged.v_cache)
    given = make.args(q, z, *caches, key, bias, row, slot, paged.page_table, 17, 3, True)
    given.kwargs["store_summaries"] = stored
    assert slot[0] % 8 == 7, "the first row completes a page"
    check(landmark_attention, "triton_few", given)


@pytest.mark.skipif(not gpu.AVAILABLE, reason="needs Triton")
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("size", [8, 64])
@pytest.mark.parametrize("programs, single", [(4, False), (8, False), (1000, True)])
def test_windows_of_a_block_for_each_program_and_of_several(
    programs, single, size, pdl, device, monkeypatch, tuned
):
    """Also for rows as short as a block, and for a padding token."""
    if pdl and gpu.INTERPRETED:
        as_if_pdl(monkeypatch)
    elif not pdl:
        monkeypatch.setattr(gpu, "supports_pdl", lambda device: False)
    tuned(ATTENTION_TUNING, programs=programs)
    tuned(TUNING, fused_whole=math.inf)
    plans, plan = [], fused_launch._plan
    monkeypatch.setattr(fused_launch, "_plan", lambda *args: plans.append(plan(*args)) or plans[-1])
    make = Make(device)
    paged = make.paged((400, 1, 63, 200), 1, size, 16)
    row, slot, _ = paged.queries((1, 1, 1, 1))
    slot[3] = -1
    q, z = (make.randn(4, 2, 16) for _ in range(2))
    key = make.randn(len(paged.k_cache), 2, 16)
    caches = (paged.k_cache, paged.v_cache)
    given = make.args(q, z, *caches, key, None, row, slot, paged.page_table, 230, 3, True)
    check(landmark_attention, "triton_few", given)
    assert {plan.single for plan in plans} == {single}


WHOLE_STEPS = [((1, 9, 150), 0), ((9,), 1), ((120, 90, 40, 7), 1)]
"""Rows with and without selected pages, for both kinds of softmax."""


@pytest.mark.skipif(not gpu.AVAILABLE, reason="needs Triton")
@pytest.mark.parametrize("lengths, softmax1", WHOLE_STEPS)
@pytest.mark.parametrize("abreast", [1, pytest.param(3, marks=pytest.mark.slow), 1000])
def test_one_launch_leaves_its_counters_clear(
    lengths, softmax1, abreast, device, monkeypatch, tuned
):
    """However many programs lie between those that wait for each other."""
    tuned(TUNING, fused_whole=0.0)
    tuned(TUNING, fused_abreast=abreast)
    tuned(TUNING, fused_chunk=8)
    kept = []

    def counters(groups, device):
        kept.append(taken(groups, device))
        return kept[-1]

    taken = grid_barrier.counters
    monkeypatch.setattr(grid_barrier, "counters", counters)
    make = Make(device)
    paged = make.paged(lengths, 2, 8, 16)
    row, slot, _ = paged.queries([1] * len(lengths))
    q, z = (make.randn(len(lengths), 4, 16) for _ in range(2))
    key = make.randn(len(paged.k_cache), 4, 16)
    caches = (paged.k_cache, paged.v_cache)
    given = make.args(q, z, *caches, key, None, row, slot, paged.page_table, 17, 3, bool(softmax1))
    for _ in range(2):
        check(landmark_attention, "triton_few", given)
    assert kept
    assert not any(tensor.any() for tensor in kept)


@pytest.mark.skipif(not gpu.AVAILABLE, reason="needs Triton")
@pytest.mark.parametrize("tokens, pdl, reading", [(8, True, True), (9, True, False), (65, 0, 0)])
def test_launches_that_fill_the_device_use_no_pdl(tokens, pdl, reading, monkeypatch, tuned):
    kernels = ("scan_kernel", "pick_kernel", "read_kernel", "step_kernel")
    scan, pick, read, step = on_hopper(monkeypatch, fused_launch, *kernels)
    (merge,) = on_hopper(monkeypatch, launch, "merge_kernel")
    make = Make()
    paged = make.paged([200] * tokens, 2, 8, 16)
    row, slot, _ = paged.queries([1] * tokens)
    q, key = make.randn(tokens, 4, 16), make.randn(len(paged.k_cache), 4, 16)
    given = (q, q, paged.k_cache, paged.v_cache, key, None, row, slot, paged.page_table, 80, 3)
    landmark_attention.using("triton_few")(*given, True)
    assert (scan.pdl, pick.pdl, merge.pdl) == ([pdl], [pdl], [pdl])
    assert read.pdl == [reading]
    tuned(TUNING, fused_whole=0.0)
    landmark_attention.using("triton_few")(*given, True)
    assert (step.pdl, len(scan.pdl), len(merge.pdl)) == ([pdl], 1, 1)


@pytest.mark.parametrize("window", [1, 8, 9, 24])
def test_the_longest_row_that_leaves_no_page_out(window):
    size, topk = 8, 3
    make = Make("cpu", seed=7)
    most = short_pages(size, window, topk)
    paged = make.paged(((most + 1) * size, 5), 2, size, 16)
    row, slot, _ = paged.queries((20, 5))
    q, z = (make.randn(row.numel(), 4, 16) for _ in range(2))
    key = make.randn(len(paged.k_cache), 4, 16)
    caches = (paged.k_cache, paged.v_cache)
    given = (q, z, *caches, key, None, row, slot, paged.page_table, window)
    found = (landmark_attention(*given, topk + 1, True)[1] >= 0).sum(-1)
    assert (found[slot == most * size - 1] == topk).all()
    assert (found[slot == (most + 1) * size - 1] == topk + 1).all()


GEOMETRIES = (
    # page size, window, topk, KV heads, group, width, slots of rows, tokens of rows
    (8, 17, 3, 2, 3, 16, (48, 9, 25), (17, 9, 3)),
    (3, 4, 5, 3, 1, 24, (21, 6), (11, 6)),
    (17, 1, 2, 1, 5, 16, (37, 0, 40), (5, 0, 21)),
    (16, 40, 4, 2, 2, 32, (110,), (70,)),
)


@pytest.mark.skipif(not gpu.INTERPRETED, reason="needs Triton, and a machine without CUDA")
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda geometry: f"pages of {geometry[0]}")
@pytest.mark.parametrize("variant", ["plain", "head", "stored", "far scores", "quantized"])
def test_short_rows_agree_with_the_definition(geometry, variant):
    """Several rows per tile, padding, part of a table, NaN in unwritten memory."""
    size, window, topk, kv_heads, group, dim, lengths, counts = geometry
    make, heads = Make("cpu", seed=11), kv_heads * group
    paged = make.paged(lengths, kv_heads, size, dim)
    row, slot, _ = paged.queries(counts)
    # Padding belongs to row 0, or to one without a slot.
    row = torch.cat((row, torch.zeros(2, dtype=row.dtype)))
    slot = torch.cat((slot, torch.full((2,), -1)))
    q, z = (make.randn(len(row), heads, dim) for _ in range(2))
    key = make.randn(len(paged.k_cache), heads, dim)
    bias = make.randn(len(paged.k_cache), heads)
    written = torch.zeros(len(paged.k_cache), dtype=torch.bool)
    for table, length in zip(paged.page_table, lengths, strict=True):
        written[table[: length // size].long()] = True
    key[~written], bias[~written] = torch.nan, torch.nan
    caches = (paged.k_cache, paged.v_cache)
    if variant == "quantized":
        packed = paged.quantized(FP4_E2M1 if dim == 32 else FP8_E4M3)
        caches = (packed.k_cache, packed.v_cache)
    if variant == "far scores":
        # exp(-200) is 0, so differences matter. Multiples of 1/4 and equal keys are rounded
        # equally.
        z, key, bias = z.round(), key.round(), (bias * 4).round() / 4 - 200.0
        q, caches = torch.full_like(q, -8.0), (caches[0] * 0.0 + 8.0, caches[1])
    width = short_pages(size, window, topk)
    spare = paged.page_table[:, -1:].expand(-1, width + 2 - paged.page_table.shape[1])
    table = torch.cat((paged.page_table, spare), 1)[:, :width]
    options = {"strategy": "head"} if variant == "head" else {"scale": 0.25}
    given = (q, z, *caches, key, None if variant == "head" else bias, row, slot, table)
    arguments = make.args(
        *(*given, window, topk, variant not in ("plain", "far scores")),
        store_summaries=variant == "stored",
        **options,
    )
    assert landmark_attention.accepts("triton_short", *arguments.args, **arguments.kwargs)
    check(landmark_attention, "triton_short", arguments)


def test_one_program_has_room_for_what_it_holds():
    half, single = torch.bfloat16, torch.float32
    for width, dtype, page_size, topk, fits in (
        *((128, half, 64, 32, True), (128, half, 128, 128, True)),
        *((128, half, 129, 32, False), (64, half, 64, 129, False)),
        *((64, single, 128, 128, True), (64, single, 129, 1, False)),
        *((256, single, 32, 32, True), (256, single, 32, 33, False)),
    ):
        q = torch.empty(1, 2, width, dtype=dtype)
        assert short_launch.accepts(q, q, page_size, topk) == fits, (width, dtype, page_size, topk)


@pytest.mark.skipif(not gpu.INTERPRETED, reason="needs Triton, and a machine without CUDA")
def test_short_rows_of_unsupported_layouts_go_to_other_implementations():
    make = Make("cpu", seed=1)
    paged = make.paged((24,), 2, 8, 16)
    row, slot, _ = paged.queries((20,))
    q, key = make.randn(20, 4, 16), make.randn(len(paged.k_cache), 2, 16)
    given = (q, q, paged.k_cache, paged.v_cache, key, None, row, slot, paged.page_table, 9, 3, True)
    assert landmark_attention.accepts("triton_short", *given)
    assert not landmark_attention.accepts("triton_short", *given, strategy="group")
