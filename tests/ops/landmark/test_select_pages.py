import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.ops import gpu, testing
from cairn.ops.landmark import select_launch
from cairn.ops.landmark.select_pages import candidate_pages, select_pages
from cairn.ops.landmark.select_task import STRATEGIES
from cairn.ops.landmark.tuning import TUNING
from tests.ops.attention.geometry import STEPS, draw

DTYPES = (torch.float32, torch.bfloat16)
NAMES = ("reference", "row_tiles")


def logaddexp(values):
    top = max(values)
    if top == -math.inf:
        return top
    return top + math.log(sum(math.exp(v - top) for v in values))


def oracle(case, token, z, key, bias, lse, window, topk, scale, strategy):
    """Lists per KV head: {page: score}, and u per query head: {page: u}, in float64 by loops."""
    row, slot = int(case.row[token]), int(case.slot[token])
    heads, groups = z.shape[1], case.heads
    pages = [j for j in range(len(case.pages[row])) if (j + 1) * case.size <= slot - window + 1]
    group = heads // groups

    def dot(query, j, head):
        summary = key[case.pages[row][j]]
        return scale * float(query @ summary[head * summary.shape[0] // heads].double())

    u, scores = [], []
    for head in range(heads):
        u.append({j: dot(z[token, head].double(), j, head) for j in pages})
        if bias is not None:
            for j in pages:
                u[-1][j] += float(bias[case.pages[row][j], head])
    for g in range(groups):
        mine = range(g * group, (g + 1) * group)
        if strategy == "group":
            total = sum(z[token, h].double() for h in mine)
            scores.append({j: dot(total, j, g * group) for j in pages})
            continue
        off = {
            h: logaddexp([float(lse[token, h]), *u[h].values()])
            if strategy in ("hils", "softmax_head")
            else 0.0
            for h in mine
        }
        scores.append({j: max(u[h][j] - off[h] for h in mine) for j in pages})
    return scores, (scores if strategy == "group" else u)


def check(case, result, expected_of, topk, tolerance=2e-5):
    indices, scores = result
    assert indices.dtype == torch.int32
    assert scores.dtype == torch.float32
    tokens = range(0, case.row.numel(), max(1, case.row.numel() // 7))
    for token in [*tokens, case.row.numel() - 1]:
        ranked, u = expected_of(token)
        per_group = scores.shape[1] // case.heads
        for g in range(case.heads):
            got = indices[token, g].tolist()
            wanted = sorted(ranked[g], key=lambda j: (-ranked[g][j], j))
            count = min(topk, len(wanted))
            assert got[count:] == [-1] * (topk - count)
            chosen = got[:count]
            assert chosen == sorted(set(chosen))
            # Pages whose scores differ by less than rounding may be exchanged at the boundary.
            for j in set(chosen) ^ set(wanted[:count]):
                assert ranked[g][j] == pytest.approx(ranked[g][wanted[count - 1]], abs=tolerance)
            for h in range(g * per_group, (g + 1) * per_group):
                assert scores[token, h, :count].tolist() == pytest.approx(
                    [u[h][j] for j in chosen], rel=1e-5, abs=tolerance
                )
                assert bool((scores[token, h, count:] == -torch.inf).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", NAMES)
def test_hils(seed, step, dtype, name):
    case = draw(300 + seed * 3 + STEPS.index(step), step, dtype)
    heads, total = case.heads * case.group, case.k_cache.shape[0]
    g = torch.Generator().manual_seed(seed)
    summary = torch.full((total, heads, case.dim), torch.nan, dtype=dtype)
    bias = torch.full((total, heads), torch.nan)
    for length, mine in zip(case.lengths, case.pages, strict=True):
        done = torch.tensor(mine[: length // case.size], dtype=torch.int64)
        made = torch.randn(len(done), heads, case.dim, generator=g)
        summary[done] = made.to(dtype)
        bias[done] = torch.rand(len(done), heads, generator=g) * 4
    z = torch.randn(case.row.numel(), heads, case.dim, generator=g).to(dtype)
    lse = torch.randn(case.row.numel(), heads, generator=g) * 2
    window, topk = (1, case.size, 2 * case.size + 3, 5)[seed], (1, 3, 4, 200)[seed]
    for b in (bias, None):
        result = select_pages.using(name)(
            *(z, summary, b, lse, *case.where, case.size, window, topk),
            num_kv_heads=case.heads,
        )

        def expected(token, b=b):
            scale = case.dim**-0.5
            return oracle(case, token, z, summary, b, lse, window, topk, scale, "hils")

        check(case, result, expected, topk)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", NAMES)
def test_landmark_keys(strategy, step, name):
    case = draw(400 + STEPS.index(step), step)
    landmark = case.k_cache[:, :, -1]
    assert not landmark.is_contiguous()
    lse = torch.randn(case.q.shape[:2])
    result = select_pages.using(name)(
        *(case.q, landmark, None, lse, *case.where, case.size, 9, 4, 0.3), strategy=strategy
    )

    def expected(token):
        return oracle(case, token, case.q, landmark, None, lse, 9, 4, 0.3, strategy)

    check(case, result, expected, 4)


@pytest.mark.parametrize("name", NAMES)
def test_group_with_fewer_query_than_kv_heads(name):
    case = draw(31, "prefill")
    g = torch.Generator().manual_seed(0)
    z = torch.randn(case.row.numel(), 2, case.dim, generator=g)
    key = torch.randn(case.k_cache.shape[0], 6, case.dim, generator=g)
    summed = key.view(-1, 2, 3, case.dim).sum(dim=2)
    common = (None, torch.zeros(z.shape[:2]), *case.where, case.size, 3, 3)
    got = select_pages.using(name)(z, key, *common, strategy="group")
    wanted = select_pages.using(name)(z, summed, *common, strategy="group")
    assert torch.equal(got[0], wanted[0])
    torch.testing.assert_close(got[1], wanted[1])


@pytest.mark.parametrize("tokens", [1, 90])
@pytest.mark.parametrize("group", [1, 4])
def test_equal_scores_keep_the_lower_page(tokens, group):
    # Five different keys over 80 pages: ties everywhere, also at the edge of the top k.
    pages, size, dim, topk = 80, 4, 16, 7
    g = torch.Generator().manual_seed(tokens)
    key = torch.randint(-2, 3, (pages, 1, 1), generator=g).expand(pages, 1, dim).float()
    z = torch.ones(tokens, group, dim)
    table = torch.randperm(pages, generator=g).to(torch.int32)[None]
    row, slot = torch.zeros(tokens, dtype=torch.int64), torch.arange(320 - tokens, 320)
    lse = torch.zeros(tokens, group)
    indices, _ = select_pages(z, key, None, lse, row, slot, table, size, 8, topk)
    for token in range(tokens):
        count = (int(slot[token]) - 7) // size
        mine = [float(key[int(table[0, j]), 0, 0]) for j in range(count)]
        best = sorted(range(count), key=lambda j: (-mine[j], j))[:topk]
        assert indices[token, 0].tolist() == sorted(best)


class Grids:
    """A fake kernel that records its launch arguments."""

    arg_names = ()

    def __init__(self, most):
        self.most = most

    def __getitem__(self, grid):
        assert all(programs <= most for programs, most in zip(grid, self.most, strict=False))
        return lambda *args, **options: None


@pytest.mark.skipif(not gpu.AVAILABLE, reason="needs Triton")
@pytest.mark.parametrize("name", ["triton_many", "triton_group"])
def test_no_launch_has_more_programs_than_devices_take(name, monkeypatch):
    most = ((1 << 31) - 1, (1 << 16) - 1, (1 << 16) - 1)
    for kernel in ("score", "normaliser", "group", "rescore"):
        monkeypatch.setattr(select_launch.kernels, f"{kernel}_kernel", Grids(most))
    for kernel in ("choose", "choose_best"):
        monkeypatch.setattr(select_launch.choosers, f"{kernel}_kernel", Grids(most))
    tokens = 70_000
    z, row = torch.zeros(tokens, 2, 16), torch.zeros(tokens, dtype=torch.int64)
    given = (z, torch.zeros(4, 1, 16), None, torch.zeros(tokens, 2), row, row, torch.zeros(1, 4))
    strategy = "group" if name == "triton_group" else "hils"
    run = select_pages.using(name)
    indices, _ = run(*given, 8, 17, 3, strategy=strategy, num_kv_heads=1)
    assert len(indices) == tokens


def test_one_token_alone_equals_the_step():
    case = draw(33, "mixed")
    heads = case.heads * case.group
    g = torch.Generator().manual_seed(1)
    key = torch.randn(case.k_cache.shape[0], heads, case.dim, generator=g)
    bias = torch.rand(case.k_cache.shape[0], heads, generator=g)
    lse = torch.randn(case.row.numel(), heads, generator=g)

    def run(using, at):
        where = (case.row[at], case.slot[at], case.page_table, case.size, 2, 3)
        return select_pages.using(using)(
            case.q[at], key, bias, lse[at], *where, num_kv_heads=case.heads
        )

    whole = run("reference", slice(None))
    for token in range(case.row.numel()):
        one = run("row_tiles", slice(token, token + 1))
        assert torch.equal(one[0][0], whole[0][token])
        torch.testing.assert_close(one[1][0], whole[1][token], rtol=1e-5, atol=1e-5)


@given(
    st.integers(2, 70), st.integers(1, 300), st.integers(0, 3000), st.sampled_from(["hils", "head"])
)
@settings(max_examples=200, deadline=None)
def test_candidates_are_the_pages_left_of_the_window(size, window, slot, strategy):
    low = size * ((slot - window + 1) // size)
    left = sum(1 for j in range(slot // size + 1) if (j + 1) * size <= low)
    assert int(candidate_pages(torch.tensor([slot]), size, window, strategy)) == left


def test_window_of_zero():
    slot = torch.tensor([6, 7, 8])
    assert candidate_pages(slot, 8, 0, "group").tolist() == [0, 1, 1]
    assert candidate_pages(slot, 8, 0, "softmax_head").tolist() == [0, 0, 1]


def test_hils_refuses_a_window_of_zero():
    with pytest.raises(ValueError, match="window"):
        candidate_pages(torch.tensor([8]), 8, 0)


def test_unknown_strategy_is_refused():
    case = draw(1, "decode")
    lse = torch.zeros(case.q.shape[:2])
    with pytest.raises(ValueError, match="strategy"):
        select_pages(
            *(case.q, case.k_cache[:, :, -1], None, lse, *case.where, case.size, 4, 2),
            strategy="heads",
        )


@pytest.mark.skipif(not gpu.AVAILABLE, reason="needs Triton")
def test_tokens_in_several_rounds(device, tuned):
    """Each round uses its slice of the normalisers."""
    z, key, bias, lse, row, slot, *rest = testing.cases_of(select_pages, device)[0].args
    tuned(TUNING, select_workspace_bytes=16 * 4 * 2 * rest[0].shape[1])
    few = slice(64, 81)
    args = (z[few], key, bias, lse[few], row[few], slot[few], *rest)
    given = testing.Arguments(args, {"num_kv_heads": 2})
    testing.check(select_pages, "triton_many", given)


def test_the_longest_row_of_the_kernels() -> None:
    for heads, groups, topk, most in ((16, 2, 8, 1 << 18), (6, 2, 4, 1 << 19), (64, 1, 512, 512)):
        query, key = torch.zeros(1, heads, 64), torch.zeros(4, groups, 64)
        assert select_launch.most_pages(heads, groups, topk) == most
        for pages, accepted in ((most, True), (most + 1, False)):
            row = torch.zeros(1, 1, dtype=torch.int32).expand(1, pages)
            assert select_launch.accepts(query, key, row, groups, topk) == accepted
