import pytest
import torch

from cairn.ops import gpu
from cairn.ops.attention.dense_attention import dense_attention
from cairn.ops.attention.tuning import TUNING
from cairn.ops.attention.window_attention import window_attention
from cairn.ops.testing import Make
from tests.ops.attention.geometry import (
    STEPS,
    draw,
    enlarge_landmarks,
    near,
    sample,
    softmax_attention,
)

DTYPES = (torch.float32, torch.bfloat16)
ORDERS = [(1, 0, 2, 3), (0, 2, 1, 3), (3, 0, 1, 2)]
"""Permutations of a cache's dims in memory (pages, heads, slots, elements)."""
DENSE = ("reference", "numba", "tiled")
WINDOW = ("reference", "numba", "tiled")


def oracle(case, token, first, mask_landmarks, scale):
    row, slot = int(case.row[token]), int(case.slot[token])
    seen = [
        t
        for t in range(max(first, 0), slot + 1)
        if not (mask_landmarks and t % case.size == case.size - 1)
    ]
    pairs = [case.key(row, t) for t in seen]
    keys = values = torch.empty(case.heads, 0, case.dim)
    if pairs:
        keys, values = (torch.stack(side, dim=1) for side in zip(*pairs, strict=True))
    o, lse = [], []
    for head in range(case.heads * case.group):
        kv = head // case.group
        q = case.q[token, head].double()
        one = softmax_attention(q, keys[kv], values[kv], scale)
        o.append(one[0])
        lse.append(one[1])
    return torch.stack(o), torch.stack(lse)


def check(case, result, first_of, mask_landmarks, scale, count=6, dtype=torch.float32):
    o, lse = result
    assert (o.dtype, lse.dtype) == (dtype, torch.float32)
    assert o.shape == case.q.shape
    assert bool(o.isfinite().all())
    assert not bool(lse.isnan().any())
    for token in sample(case, count):
        wanted = oracle(case, token, first_of(int(case.slot[token])), mask_landmarks, scale)
        near(o[token], wanted[0], case.dtype)
        # The flash kernel's exp for bfloat16 has 20 bits.
        atol = 2e-5 if case.dtype == torch.float32 else 3e-4
        torch.testing.assert_close(lse[token].double(), wanted[1], rtol=1e-5, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("implementation", WINDOW)
def test_window(seed, step, dtype, implementation):
    case = draw(seed * 3 + STEPS.index(step), step, dtype)
    window = (1, 7, case.size, 3 * case.size + 1)[seed]
    run = window_attention.using(implementation)
    for aligned in (False, True):
        for mask in (False, True):
            if window == 1 and not aligned and implementation == "tiled":
                continue
            if mask:
                enlarge_landmarks(case)

            def first(s, aligned=aligned):
                low = s - window + 1
                return case.size * (low // case.size) if aligned else low

            caches = (case.k_cache, case.v_cache)
            options = {"aligned": aligned, "mask_landmarks": mask}
            result = run(case.q, *caches, *case.where, window, **options)
            check(case, result, first, mask, case.dim**-0.5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("implementation", DENSE)
def test_dense(seed, step, dtype, implementation):
    case = draw(100 + seed * 3 + STEPS.index(step), step, dtype)
    run = dense_attention.using(implementation)
    given = (case.q, case.k_cache, case.v_cache, *case.where)
    check(case, run(*given), lambda s: 0, False, case.dim**-0.5, 4, dtype)
    enlarge_landmarks(case)
    check(case, run(*given, 0.2, True), lambda s: 0, True, 0.2, 4, dtype)


@pytest.mark.parametrize("blocks", [1 << 12, 1 << 15])
@pytest.mark.parametrize("op", [dense_attention, window_attention])
def test_block_budget_changes_nothing(op, blocks, tuned):
    case = draw(5, "mixed")
    extra = () if op is dense_attention else (19,)
    given = (case.q, case.k_cache, case.v_cache, *case.where, *extra)
    names = DENSE if op is dense_attention else WINDOW
    whole = {name: op.using(name)(*given) for name in names}
    tuned(TUNING, paging_block_bytes=blocks)
    for name in names:
        for got, wanted in zip(op.using(name)(*given), whole[name], strict=True):
            torch.testing.assert_close(got, wanted, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("op", [dense_attention, window_attention])
def test_order_of_tokens_is_free(op):
    case = draw(11, "prefill")
    extra = () if op is dense_attention else (30,)
    shuffled = torch.randperm(case.row.numel())
    straight = op(case.q, case.k_cache, case.v_cache, *case.where, *extra)
    where = (case.row[shuffled], case.slot[shuffled], case.page_table)
    mixed = op(case.q[shuffled], case.k_cache, case.v_cache, *where, *extra)
    for got, wanted in zip(mixed, straight, strict=True):
        torch.testing.assert_close(got, wanted[shuffled])


@pytest.mark.parametrize("op", [dense_attention, window_attention])
def test_a_slot_asked_twice(op):
    case = draw(13, "prefill")
    extra = () if op is dense_attention else (30,)
    twice = torch.arange(case.row.numel()).repeat(2)
    once = op(case.q, case.k_cache, case.v_cache, *case.where, *extra)
    q = torch.cat([case.q, -case.q])
    where = (case.row[twice], case.slot[twice], case.page_table)
    both = op(q, case.k_cache, case.v_cache, *where, *extra)
    torch.testing.assert_close(both[0][: case.row.numel()], once[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("mask", [False, True])
def test_a_token_alone_equals_the_step(aligned, mask):
    for seed in (40, 41):
        case = draw(seed, "mixed")
        enlarge_landmarks(case, torch.nan if mask else 1.0)
        caches, options = (case.k_cache, case.v_cache), {"aligned": aligned, "mask_landmarks": mask}
        whole = window_attention.using("reference")(case.q, *caches, *case.where, 13, **options)
        alone = window_attention.using("numba")
        for token in range(case.row.numel()):
            at = slice(token, token + 1)
            where = (case.row[at], case.slot[at], case.page_table)
            for got, wanted in zip(
                alone(case.q[at], *caches, *where, 13, **options), whole, strict=True
            ):
                torch.testing.assert_close(got[0], wanted[token], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("implementation", WINDOW)
def test_pages_behind_the_window_may_hold_anything(implementation, step):
    """Layers with their own page pool free pages as soon as no window needs them."""
    for seed in range(50, 54):
        case, window = draw(seed, step), (9, 40)[seed % 2]
        run = window_attention.using(implementation)
        options = {"aligned": seed % 3 == 0, "mask_landmarks": seed % 2 == 0}
        given = (*case.where, window)
        wanted = run(case.q, case.k_cache, case.v_cache, *given, **options)
        assert bool(wanted[0].isfinite().all())
        for row, pages in enumerate(case.pages):
            first = int(case.slot[case.row == row].min())
            for page in pages[: max(0, (first - window + 1) // case.size)]:
                case.k_cache[page] = case.v_cache[page] = torch.nan
        got = run(case.q, case.k_cache, case.v_cache, *given, **options)
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_landmark_with_a_window_of_one_sees_nothing():
    case = draw(2, "prefill")
    o, lse = window_attention(
        case.q, case.k_cache, case.v_cache, *case.where, 1, mask_landmarks=True
    )
    landmark = case.slot % case.size == case.size - 1
    assert bool(landmark.any())
    assert bool((o[landmark] == 0).all())
    assert bool((lse[landmark] == -torch.inf).all())


def test_strided_caches():
    case = draw(17, "mixed")
    k, v = (torch.stack([x, x], dim=-1)[..., 0] for x in (case.k_cache, case.v_cache))
    for op, extra in ((dense_attention, ()), (window_attention, (21,))):
        wanted = op.using("reference")(case.q, case.k_cache, case.v_cache, *case.where, *extra)
        got = op(case.q, k, v, *case.where, *extra)
        torch.testing.assert_close(got[0], wanted[0])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("step", STEPS)
def test_caches_in_any_order(step, order):
    case = draw(17, step)
    back = [order.index(dim) for dim in range(4)]
    k, v = (x.permute(order).contiguous().permute(back) for x in (case.k_cache, case.v_cache))
    for op, extra in ((dense_attention, ()), (window_attention, (21,))):
        wanted = op.using("reference")(case.q, case.k_cache, case.v_cache, *case.where, *extra)
        got = op(case.q, k, v, *case.where, *extra)
        torch.testing.assert_close(got[0], wanted[0])


@pytest.mark.skipif(not gpu.INTERPRETED, reason="needs Triton, and a machine without CUDA")
@pytest.mark.parametrize("count", [1, 20])
@pytest.mark.parametrize("implementation", ["triton_splits", "triton_tiles"])
def test_kernels_tell_that_a_row_is_no_number(implementation, count):
    make = Make("cpu")
    paged = make.paged((75, 30), 2, 8, 16)
    row, slot, _ = paged.queries((count, 1))
    q = make.randn(count + 1, 4, 16)
    q[-1, 1, 3] = torch.nan
    given = (q, paged.k_cache, paged.v_cache, row, slot, paged.page_table)
    for op, options in ((dense_attention, ()), (window_attention, (20,))):
        o, lse = op.using(implementation)(*given, *options)
        assert o[-1, 1].isnan().all() and lse[-1, 1].isnan()
        o[-1, 1] = lse[-1, 1] = 0
        assert o.isfinite().all() and lse.isfinite().all()


@pytest.mark.skipif(not gpu.INTERPRETED, reason="needs Triton, and a machine without CUDA")
@pytest.mark.parametrize("implementation", ["triton_splits", "triton_tiles"])
def test_nan_values_of_one_row_do_not_reach_others(implementation):
    """Tokens of several rows share a tile; values of the first and the last row contain NaN."""
    paged = Make("cpu").paged((12, 20, 9), 2, 8, 16)
    row, slot, _ = paged.queries((4, 4, 4))
    q = Make("cpu").randn(12, 4, 16)
    for spoilt in (0, 2):
        paged.v_cache[paged.page_table[spoilt, 0], :, 3] = torch.nan
    given = (q, paged.k_cache, paged.v_cache, row, slot, paged.page_table)
    for op, options in ((dense_attention, ()), (window_attention, (30,))):
        o, _ = op.using(implementation)(*given, *options)
        assert o[row != 1].isnan().all()
        assert o[row == 1].isfinite().all()
