import math

import pytest
import torch

from cairn.ops import gpu
from cairn.ops.attention.tuning import TUNING as ATTENTION_TUNING
from cairn.ops.landmark.blend_window import blend_window
from cairn.ops.landmark.mean_summary import mean_summary
from cairn.ops.landmark.page_attention import page_attention
from cairn.ops.landmark.page_weights import page_weights
from cairn.ops.landmark.prior_summary import prior_summary
from cairn.ops.landmark.store_prior_summary import completed_pages
from cairn.ops.landmark.tuning import TUNING
from cairn.ops.testing import Arguments, check
from tests.ops.attention.geometry import STEPS, draw, enlarge_landmarks, near, softmax_attention

DTYPES = (torch.float32, torch.bfloat16)
ORDERS = [(1, 0, 2, 3), (0, 2, 1, 3), (3, 0, 1, 2)]
"""Permutations of a cache's dims in memory (pages, heads, slots, elements)."""


def complete_pages(case):
    return [
        page
        for length, mine in zip(case.lengths, case.pages, strict=True)
        for page in mine[: length // case.size]
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_prior_summary(seed, dtype):
    case = draw(seed, "decode", dtype)
    enlarge_landmarks(case)
    pages = complete_pages(case)[:5]
    g = torch.Generator().manual_seed(seed)
    query = (torch.randn(len(pages), case.heads * case.group, case.dim, generator=g) * 4).to(dtype)
    key, bias = prior_summary(query, case.k_cache, torch.tensor(pages, dtype=torch.int64))
    assert key.dtype == dtype
    assert bias.dtype == torch.float32
    for n, page in enumerate(pages):
        for head in range(query.shape[1]):
            keys = [
                case.k_cache[page, head // case.group, i].double() for i in range(case.size - 1)
            ]
            mu, scale = query[n, head].double(), case.dim**-0.5
            near(key[n, head], softmax_attention(mu, keys, keys, scale)[0], dtype)
            logits = torch.tensor([float(scale * mu @ k) for k in keys], dtype=torch.float64)
            p = torch.softmax(logits, 0).tolist()
            entropy = -sum(x * math.log(x) for x in p if x > 0)
            assert float(bias[n, head]) == pytest.approx(entropy, abs=2e-5)
            assert -1e-6 <= float(bias[n, head]) <= math.log(case.size - 1) + 1e-5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mean_summary(dtype):
    case = draw(21, "decode", dtype)
    pages = complete_pages(case)
    got = mean_summary(case.k_cache, torch.tensor(pages))
    for n, page in enumerate(pages):
        near(got[n], case.k_cache[page].double().sum(1) / case.size, dtype)


def selection(case, topk, seed):
    """Random ascending pages below each token's page, -1 padded; a few tokens with none."""
    g = torch.Generator().manual_seed(seed)
    indices = torch.full((case.row.numel(), case.heads, topk), -1, dtype=torch.int32)
    for token, slot in enumerate(case.slot.tolist()):
        for head in range(case.heads):
            below = slot // case.size
            count = min(below, int(torch.randint(0, topk + 1, (), generator=g)))
            chosen = torch.randperm(max(below, 1), generator=g)[:count].sort().values
            indices[token, head, :count] = chosen.to(torch.int32)
    return indices


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("implementation", ["reference", "page_major"])
def test_page_attention(seed, step, dtype, implementation):
    case = draw(200 + seed * 3 + STEPS.index(step), step, dtype)
    enlarge_landmarks(case, torch.nan if seed % 2 else 1e30)
    indices = selection(case, 6, seed)
    g = torch.Generator().manual_seed(seed)
    weights = torch.rand(case.row.numel(), case.heads * case.group, 6, generator=g)
    # Weights of padding entries must have no effect.
    weights[(indices < 0).repeat_interleave(case.group, dim=1)] = torch.nan
    run = page_attention.using(implementation)
    caches = (case.k_cache, case.v_cache)
    got = run(case.q, *caches, case.row, case.page_table, indices, weights)
    assert got.dtype == torch.float32
    assert bool(got.isfinite().all())
    for token in range(0, case.row.numel(), max(1, case.row.numel() // 5)):
        row = int(case.row[token])
        for head in range(case.heads * case.group):
            wanted = torch.zeros(case.dim, dtype=torch.float64)
            kv = head // case.group
            for place, page in enumerate(indices[token, kv].tolist()):
                if page < 0:
                    continue
                slots = range(page * case.size, (page + 1) * case.size - 1)
                pairs = [case.key(row, t) for t in slots]
                keys, values = [k[kv] for k, _ in pairs], [v[kv] for _, v in pairs]
                inside = softmax_attention(
                    case.q[token, head].double(), keys, values, case.dim**-0.5
                )[0]
                wanted += weights[token, head, place].double() * inside
            near(got[token, head], wanted, dtype)


@pytest.mark.parametrize("topk", [1, 32])
def test_page_attention_of_popular_and_rare_pages(topk):
    # A page that all tokens select fills the largest tiles, the others the smallest.
    case = draw(3, "prefill")
    indices = selection(case, topk, 1)
    indices[..., 0] = 0
    weights = torch.rand(case.row.numel(), case.heads * case.group, topk)
    given = (case.q, case.k_cache, case.v_cache, case.row, case.page_table, indices, weights)
    wanted = page_attention.using("reference")(*given)
    torch.testing.assert_close(
        page_attention.using("page_major")(*given), wanted, rtol=2e-5, atol=5e-6
    )


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("step", STEPS)
def test_page_attention_of_caches_in_any_order(step, order):
    case = draw(3, step)
    back = [order.index(dim) for dim in range(4)]
    indices = selection(case, 5, 1)
    weights = torch.rand(case.row.numel(), case.heads * case.group, 5)
    others = (case.row, case.page_table, indices, weights)
    caches = (case.k_cache, case.v_cache)
    wanted = page_attention.using("reference")(case.q, *caches, *others)
    moved = (x.permute(order).contiguous().permute(back) for x in caches)
    torch.testing.assert_close(page_attention(case.q, *moved, *others), wanted)


@pytest.mark.parametrize("none", [-2, -(1 << 31)])
def test_any_negative_place_holds_no_page(none):
    g = torch.Generator().manual_seed(0)
    q, cache = torch.randn(40, 2, 16, generator=g), torch.randn(6, 1, 4, 16, generator=g)
    row, table = torch.zeros(40, dtype=torch.int64), torch.arange(6, dtype=torch.int32).view(1, 6)
    indices = torch.randint(-1, 3, (40, 1, 3), generator=g, dtype=torch.int32)
    weights = torch.rand(40, 2, 3, generator=g)
    run = page_attention.using("page_major")
    wanted = run(q, cache, cache, row, table, indices, weights)
    indices[indices < 0] = none
    assert torch.equal(run(q, cache, cache, row, table, indices, weights), wanted)


@pytest.mark.skipif(not gpu.INTERPRETED, reason="needs Triton, and a machine without CUDA")
def test_page_attention_where_many_tokens_select_a_page(tuned):
    # Blocks and units as small as can be: many of both meet at the page that everybody selects.
    tuned(TUNING, page_block=16)
    tuned(TUNING, page_unit_pairs=4)
    tuned(TUNING, page_unit_lines=4)
    case = draw(3, "prefill")
    indices = selection(case, 4, 1)
    indices[..., 0] = 0
    weights = torch.rand(case.row.numel(), case.heads * case.group, 4)
    given = Arguments(
        (case.q, case.k_cache, case.v_cache, case.row, case.page_table, indices, weights), {}
    )
    check(page_attention, "triton_sorted", given)


@pytest.mark.skipif(not gpu.INTERPRETED, reason="needs Triton, and a machine without CUDA")
@pytest.mark.parametrize("scale", [-20.0, 0.0, 20.0])
def test_sorted_page_attention_by_any_scale(scale):
    # Logits differ by hundreds: exp relative to anything but the maximum overflows.
    case = draw(3, "prefill")
    indices = selection(case, 4, 1)
    weights = torch.rand(case.row.numel(), case.heads * case.group, 4)
    given = (case.q, case.k_cache, case.v_cache, case.row, case.page_table, indices, weights)
    torch.testing.assert_close(
        page_attention.using("triton_sorted")(*given, scale),
        page_attention.using("reference")(*given, scale),
        rtol=1e-3,
        atol=1e-4,
    )


def test_page_attention_block_budget_changes_nothing(tuned):
    case = draw(8, "prefill")
    indices = selection(case, 5, 1)
    weights = torch.rand(case.row.numel(), case.heads * case.group, 5)
    given = (case.q, case.k_cache, case.v_cache, case.row, case.page_table, indices, weights)
    names = ("reference", "page_major")
    whole = {name: page_attention.using(name)(*given) for name in names}
    tuned(ATTENTION_TUNING, paging_block_bytes=1)
    for name in names:
        got = page_attention.using(name)(*given)
        torch.testing.assert_close(got, whole[name], rtol=5e-6, atol=5e-6)


@pytest.mark.parametrize("softmax1", [False, True])
def test_page_weights(softmax1):
    g = torch.Generator().manual_seed(4)
    scores, lse = torch.randn(40, 3, 5, generator=g) * 30, torch.randn(40, 3, generator=g) * 30
    scores[torch.rand(40, 3, 5, generator=g) < 0.4] = -torch.inf
    lse[torch.rand(40, 3, generator=g) < 0.4] = -torch.inf
    weights, window = page_weights(scores, lse, softmax1)
    for token in range(40):
        for head in range(3):
            logits = [*scores[token, head].tolist(), float(lse[token, head])]
            logits += [0.0] if softmax1 else []
            top = max(logits)
            terms = [math.exp(x - top) if x > -math.inf else 0.0 for x in logits]
            total = sum(terms) or 1.0
            for place in range(5):
                got = float(weights[token, head, place])
                assert got == pytest.approx(terms[place] / total, rel=1e-5, abs=1e-9)
            assert float(window[token, head]) == pytest.approx(terms[5] / total, rel=1e-5, abs=1e-9)
            assert (weights[token, head] > 0).sum() <= (scores[token, head] > -math.inf).sum()


def test_blend_window_rounds_once():
    g = torch.Generator().manual_seed(5)
    pages, window = torch.randn(2, 7, 3, 8, generator=g)
    weight = torch.rand(7, 3, generator=g)
    exact = pages.double() + weight.double()[..., None] * window.double()
    got = blend_window(pages, window, weight, torch.bfloat16)
    assert got.dtype == torch.bfloat16
    error = (got.double() - exact).abs()
    assert bool((error <= exact.abs() * 2**-8).all())


def test_only_tokens_in_the_last_slot_of_a_page_complete_it():
    table = torch.tensor([[5, 6], [3, 4]], dtype=torch.int32)
    row, slot = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([-1, 7, 14, 15, 8])
    assert completed_pages(row, slot, table, 8).tolist() == [-1, 5, -1, 4, -1]
