"""The wgmma kernel of page scores for many tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.landmark import select_launch
from cairn.ops.landmark.select_pages import _selection, select_pages
from cairn.ops.landmark.tuning import TUNING
from cairn.ops.launch_cache.plans import Plans
from cairn.ops.testing import Arguments, Make, check, run
from tests.ops.tables import Tuned

needs_groups = pytest.mark.skipif(
    not (torch.cuda.is_available() and gpu.supports_wgmma(torch.device("cuda", 0))),
    reason="needs Hopper's tensor cores and Triton 3.6",
)
SIZE, WINDOW = 4, 9
SHAPES = [(16, 2, 64), (4, 4, 64), (6, 3, 128), (2, 2, 128), (4, 1, 64)]
"""Heads, KV heads and width."""


def drawn(
    device: str,
    shape: tuple[int, int, int],
    dtype: torch.dtype = torch.bfloat16,
    lengths: tuple[int, ...] = (1500, 9, 90, 1100, 0, 700),
    counts: tuple[int, ...] = (200, 1, 90, 77, 0, 130),
    topk: int = 7,
    bias: bool = True,
) -> Arguments:
    """Tiles of one and of several sequences, with multiples of 1/4, whose sums are exact in any
    order."""
    heads, groups, dim = shape
    make = Make(device)
    paged = make.paged(lengths, groups, SIZE, dim, dtype=dtype)
    row, slot, _ = paged.queries(counts)
    pages = paged.k_cache.shape[0]
    z = make.randint(-2, 3, row.numel(), heads, dim).to(dtype)
    key = make.randint(-2, 3, pages, heads, dim).to(dtype) / 4
    added = make.randint(-40, 41, pages, heads).float() / 4 if bias else None
    lse = make.randn(row.numel(), heads)
    where = (row, slot, paged.page_table, SIZE, WINDOW, topk, 0.25)
    return make.args(z, key, added, lse, *where, num_kv_heads=groups)


@pytest.fixture
def only_groups(monkeypatch: pytest.MonkeyPatch, tuned: Tuned) -> None:
    """Within the block, this kernel runs for any number of pages."""

    def never(*args: Any) -> None:
        raise AssertionError

    tuned(TUNING, select_min_pages=0)
    monkeypatch.setattr(select_launch, "_score_groups", never)


def selected(given: Arguments) -> tuple[Tensor, ...]:
    return run(select_pages, "triton_many", given)[1]


@pytest.mark.gpu
@needs_groups
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_pages_of_the_definition(
    shape: tuple[int, int, int], bias: bool, dtype: torch.dtype, only_groups: None
) -> None:
    given = drawn("cuda", shape, dtype, bias=bias)
    check(select_pages, "triton_many", given)
    for strategy in ("head", "softmax_head"):
        kwargs = given.kwargs | {"strategy": strategy}
        check(select_pages, "triton_many", Arguments(given.args, kwargs))


@pytest.mark.gpu
@needs_groups
@pytest.mark.parametrize("size", [1e-3, 1.0, 300.0])
def test_biases_keep_their_digits(size: float) -> None:
    given = drawn("cuda", SHAPES[0], lengths=(2000,), counts=(150,))
    z, key, bias, _, _, slot, table, *_ = given.args
    bias.normal_().mul_(size)
    job = _selection(select_pages.bind(*given.args, **given.kwargs))
    total = torch.randn(job.heads, len(z), device="cuda")
    best = torch.full((len(z), job.groups, -(-job.pages // 32) * 32), 7.0, device="cuda")
    tops = torch.full((len(z), job.groups, best.shape[2] // job.block), 7.0, device="cuda")
    select_launch._score_in_groups(job, total, best, tops)
    page = table[0].long()
    wanted = torch.einsum("thd,phd->thp", z.double(), key[page].double()) * job.scale
    wanted += bias[page].double().T - total.double().T.unsqueeze(2)
    wanted = wanted.unflatten(1, (job.groups, -1)).amax(2)
    for token in (0, 63, 64, 127, 128, 149):
        seen = int(slot[token] - job.offset) // SIZE
        got = best[token, :, :seen].double()
        torch.testing.assert_close(got, wanted[token, :, :seen], rtol=1e-6, atol=1e-6)
        blocks = got[:, : seen // job.block * job.block].unflatten(1, (-1, job.block)).amax(2)
        assert torch.equal(tops[token, :, : blocks.shape[1]].double(), blocks)


@pytest.mark.gpu
@needs_groups
def test_programs_that_share_a_row(only_groups: None, monkeypatch: pytest.MonkeyPatch) -> None:
    given = drawn("cuda", SHAPES[0], lengths=(9000, 7000), counts=(150, 99))
    wanted = selected(given)
    check(select_pages, "triton_many", given)
    for processors in (1, 33, 1000):
        monkeypatch.setattr(gpu, "sm_count", lambda device, n=processors: n)
        for one, other in zip(selected(given), wanted, strict=True):
            assert torch.equal(one, other)


@pytest.mark.gpu
@needs_groups
def test_large_blocks_and_one_run_like_another(only_groups: None) -> None:
    length = SIZE * 17_000
    given = drawn("cuda", (8, 1, 64), lengths=(length, 3000), counts=(300, 170), topk=32)
    wanted = selected(given)
    check(select_pages, "triton_many", given)
    for _ in range(20):
        for one, other in zip(selected(given), wanted, strict=True):
            assert torch.equal(one, other)


@pytest.mark.gpu
@needs_groups
def test_nan_of_one_page_or_token_does_not_reach_others(only_groups: None) -> None:
    given = drawn("cuda", SHAPES[0])
    z, key, bias, _, row, _, table, *_ = given.args
    wanted = selected(given)
    # Pages that nobody has selected, and a bias that rules a page out for one row.
    key[table[0, -1].long()] = torch.nan
    z[row == 2] = torch.nan
    for place, one in enumerate(selected(given)):
        assert torch.equal(one[row != 2], wanted[place][row != 2])
    page = int(wanted[0][0, 0, 0])
    bias[int(table[0, page])] = -torch.inf
    found = selected(given)[0]
    assert page not in found[0, 0].tolist()
    assert torch.equal(found[row == 3], wanted[0][row == 3])


def test_which_selections_are_scored_in_groups(
    monkeypatch: pytest.MonkeyPatch, tuned: Tuned
) -> None:
    monkeypatch.setattr(gpu, "supports_wgmma", lambda device: True)
    tuned(TUNING, select_min_pages=0)

    def taken(shape: tuple[int, int, int], dtype: torch.dtype, **changed: Any) -> bool:
        given = drawn("cpu", shape, dtype)
        return select_launch.in_groups(
            _selection(select_pages.bind(*given.args, **given.kwargs | changed))
        )

    assert all(taken(shape, torch.bfloat16) for shape in SHAPES)
    assert taken(SHAPES[0], torch.float16)
    assert not taken(SHAPES[0], torch.float32)
    # Refused: group sizes that are not a power of two, too many queries, other widths.
    assert not taken((6, 2, 64), torch.bfloat16)
    assert not taken((16, 1, 64), torch.bfloat16)
    assert not taken((4, 1, 128), torch.bfloat16)
    assert not taken((4, 2, 32), torch.bfloat16)
    few = drawn("cpu", SHAPES[0], lengths=(500,), counts=(127,))
    assert not select_launch.in_groups(_selection(select_pages.bind(*few.args, **few.kwargs)))
    tuned(TUNING, select_min_pages=1000)
    assert not taken(SHAPES[0], torch.bfloat16)


@pytest.mark.gpu
@needs_groups
def test_launches_made_again_find_the_pages_of_other_queries(only_groups: None) -> None:
    plans, plain = Plans(), []
    function = select_pages.using("triton_many")

    def plainly(args: Any, kwargs: Any) -> Any:
        plain.append(args)
        return function(*args, **kwargs)

    given = drawn("cuda", SHAPES[0])
    for factor in (1, -1, 2):
        args = (given.args[0] * factor, *given.args[1:])
        found = plans.run(plainly, args, given.kwargs)
        for own, wanted in zip(found, function(*args, **given.kwargs), strict=True):
            assert torch.equal(own, wanted)
    assert len(plain) == 1
