"""The nucleus of rows by passes over them, and by a team where a pass is not enough."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.registry import Op
from cairn.ops.sampling import passes, teams
from cairn.ops.sampling.top_p_renorm_probs import top_p_renorm
from tests.ops.launches import on_hopper
from tests.ops.sampling.test_teams import (
    assert_any_share,
    assert_as_defined,
    assert_drawn,
    assert_draws_again,
    given,
    shares,
)

INF, NAN = float("inf"), float("nan")
INTERPRETED = pytest.mark.skipif(
    not gpu.INTERPRETED, reason="needs Triton, and a machine without CUDA"
)
UNIFORM = torch.tensor([0.0, 0.37, 0.71, 1 - 2.0**-24])


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes for few rows, too."""
    monkeypatch.setattr(passes, "FEW_ROWS", 0)
    monkeypatch.setattr(passes, "FEW_DRAWS", 0)


@pytest.fixture
def open_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each call leaves to a team."""
    counts: list[int] = []

    def watched(call: Any) -> Any:
        def share(*args: Any) -> Tensor:
            counts.append(int(args[-1].left_open))
            result: Tensor = call(*args)
            return result

        return share

    monkeypatch.setattr(teams, "keep_share", watched(teams.keep_share))
    monkeypatch.setattr(teams, "draw_share", watched(teams.draw_share))
    return counts


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 512 numbers, 4 for a thread, and short lists."""
    monkeypatch.setattr(passes, "BLOCK", 512)
    monkeypatch.setattr(passes, "LISTED", 512)
    monkeypatch.setattr(passes, "SOME", 512)
    monkeypatch.setattr(passes, "ROW_WARPS", 4)


@INTERPRETED
@pytest.mark.parametrize(("op", "values", "parameter"), [*shares()])
def test_shares(op: Op[..., Any], values: Tensor, parameter: Tensor, small: None) -> None:
    assert_as_defined(op, passes.keep_share(values, parameter), values, parameter)
    assert_drawn(passes.draw_share(values, parameter, UNIFORM), values, parameter, UNIFORM)


def drawn(kind: str) -> Tensor:
    torch.manual_seed(11)
    logits = torch.randn(6, 20_000)
    if kind == "peaked":
        logits[:, ::4000] += 9
    return (logits * {"flat": 0.1, "level": 0.0, "sharp": 6.0}.get(kind, 3.0)).softmax(-1)


@INTERPRETED
@pytest.mark.parametrize("kind", ["flat", "plain", "sharp", "peaked", "level"])
def test_a_guess_is_mostly_right(kind: str, open_rows: list[int]) -> None:
    probs, p = drawn(kind), torch.tensor([0.8, 0.84, 0.88, 0.92, 0.96, 0.99])
    assert_as_defined(top_p_renorm, passes.keep_share(probs, p), probs, p)
    assert open_rows == [6 if kind == "level" else 0]


@INTERPRETED
def test_open_rows_beside_others(open_rows: list[int]) -> None:
    probs = torch.cat([drawn("plain")[:3], drawn("level")[:2], drawn("sharp")[:2]])
    p = torch.tensor([0.8, 0.9, 0.96, 0.3, 0.9, 0.9, 0.99])
    uniform = torch.tensor([0.0, 0.5, 0.9, 0.1, 0.7, 0.4, 0.99])
    assert_as_defined(top_p_renorm, passes.keep_share(probs, p), probs, p)
    assert_drawn(passes.draw_share(probs, p, uniform), probs, p, uniform)
    assert open_rows == [2, 2]


@INTERPRETED
def test_open_rows_of_more_than_a_team_takes_at_a_time(
    open_rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teams, "WORKSPACE_BYTES", 0)
    probs = drawn("sharp")[:, :300].repeat(7, 1)[:40]
    probs /= probs.sum(-1, keepdim=True)
    probs[[3, 35, 38]] = torch.linspace(1e-3, 0.3, 40)[:3, None]
    p = torch.linspace(0.5, 0.99, 40)
    monkeypatch.setattr(passes, "LISTED", 256)
    assert_as_defined(top_p_renorm, passes.keep_share(probs, p), probs, p)
    assert_drawn(passes.draw_share(probs, p, p), probs, p, p)
    assert open_rows == [3, 3]


@pytest.mark.parametrize("rows", [2, 300])
@pytest.mark.parametrize("width", [1, 512, 4097, 9001, 100_278, 131_073, 500_000])
def test_parts_hold_a_row_and_none_is_empty(rows: int, width: int) -> None:
    align, part, parts, slots = passes.split(torch.empty(rows, width, device="meta"))
    longest = width + (0 if width % align == 0 else align - 1)
    assert (parts - 1) * part < longest <= parts * part
    assert parts <= passes.MOST_PARTS
    assert part <= passes.MOST_PART
    assert parts * slots <= passes.LISTED
    assert slots % passes.ALIGNED == 0


class Guess:
    """Takes the place of the kernel that guesses."""

    def __init__(self, low: float, high: float) -> None:
        self.bounds = torch.tensor([low, high]).view(torch.int32)

    def __getitem__(self, grid: tuple[int]) -> Any:
        def guess(probs: Tensor, top_p: Tensor, bounds: Tensor, left: Tensor, *_: Any, **__: Any):
            bounds.copy_(self.bounds.expand_as(bounds))
            left.zero_()

        return guess


@INTERPRETED
@pytest.mark.parametrize(
    ("low", "high", "crowded"),
    [
        (9e-4, 2e-3, 1),
        (1.05e-3, 2e-3, 1),
        (9e-4, 1.05e-3, 1),
        (1e-5, 5e-4, 1),
        (0.2, 0.9, 1),
        (9e-4, 2e-3, 0),
    ],
)
def test_any_guess(
    low: float,
    high: float,
    crowded: int,
    small: None,
    open_rows: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Crowded: a part has more numbers between than it lists; what the others list is enough.
    row = torch.full((3 * 512 - 8,), 1e-6)
    row[: 300 if crowded else 100] = 1.1e-3
    row[600:720] = row[1100:1220] = 1e-3
    row[-1] = 0.35
    probs, p = (row / row.sum())[None], torch.tensor([0.5])
    monkeypatch.setattr(passes, "guess_kernel", Guess(low, high))
    assert_as_defined(top_p_renorm, passes.keep_share(probs, p), probs, p)
    assert_drawn(passes.draw_share(probs, p, p), probs, p, p)
    assert open_rows == [crowded] * 2


@INTERPRETED
def test_rows_that_are_not_finite_keep_all() -> None:
    rows = torch.tensor([[0.5, INF, 0.25], [0.5, NAN, 0.0], [-NAN, 1.0, 0.0], [0.0, 0.0, 0.0]])
    for share in (0.5, 1.0):
        p = torch.full((4,), share)
        assert passes.draw_share(rows, p, p * 0.9).tolist() == [-1] * 4
        got = passes.keep_share(rows, p)
        assert got[0, [0, 2]].tolist() == [0.0, 0.0]
        assert got[:3, 1].isnan().all()
        assert got[3].tolist() == [0.0] * 3


@INTERPRETED
@pytest.mark.parametrize("rows", [1, 5])
def test_more_rows_than_at_a_time_and_parts_of_several_blocks(
    rows: int, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "MOST_ROWS", 2)
    monkeypatch.setattr(passes, "MOST_PARTS", 4)
    torch.manual_seed(rows)
    tied = (torch.randn(rows, 3001) * 4).round() / 4
    for values in (torch.randn(rows, 3001), tied):
        probs, p = values.softmax(-1), torch.rand(rows) * 0.3 + 0.6
        uniform = torch.rand(rows)
        assert_as_defined(top_p_renorm, passes.keep_share(probs, p), probs, p)
        assert_drawn(passes.draw_share(probs, p, uniform), probs, p, uniform)


@pytest.mark.parametrize("rows", [0, 1, 8, 9])
def test_few_and_wide_rows_are_left_to_teams(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    called: list[str] = []
    monkeypatch.setattr(passes, "_pass", lambda *args: called.append("passes"))
    monkeypatch.setattr(teams, "keep_share", lambda *args: called.append("team"))
    monkeypatch.setattr(teams, "draw_share", lambda *args: called.append("team"))
    p = torch.rand(rows)
    for width in (10, 1 << 20):
        probs = torch.empty(rows, width, device="meta")
        passes.keep_share(probs, p)
        passes.draw_share(probs, p, p)
    assert called == [
        "passes" if rows > 8 else "team",
        "passes" if rows > 1 else "team",
        *["team"] * 2,
    ]


@pytest.mark.skipif(not gpu.AVAILABLE, reason="needs Triton")
def test_all_are_launched_early_and_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "processors", lambda _device: 132)
    monkeypatch.setattr(teams, "keep_share", lambda *args: None)
    names = ("guess_kernel", "list_kernel", "settle_kernel", "store_kernel")
    kernels = on_hopper(monkeypatch, passes, *names)
    passes.keep_share(torch.empty(3, 9001), torch.empty(3))
    for launched in kernels:
        assert launched.early == [True]
        assert launched.args[0][-1], "who is launched early waits"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "width"),
    [(1, 100_278), (3, 100_277), (7, 32_000), (300, 100_278), (9, 1 << 19), (2100, 9001)],
)
def test_many_rows(rows: int, width: int) -> None:
    torch.manual_seed(rows)
    probs, p = given(top_p_renorm, rows, width)
    assert_as_defined(top_p_renorm, passes.keep_share(probs, p), probs, p)
    assert_draws_again(passes, probs, p)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [100_278, 40_001, 301, 7])
@pytest.mark.parametrize("sharpness", [0.0, 0.1, 1.0, 3.0, 9.0])
def test_any_share(width: int, sharpness: float) -> None:
    assert_any_share(passes, width, sharpness, "cuda")
