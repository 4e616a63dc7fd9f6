"""Top-p sampling from rows whose mass lies in few, many or nearly all lines."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cairn.ops.sampling import launch
from cairn.ops.sampling.tuning import TUNING
from tests.ops.tables import Tuned

WIDTH = 9001
ROWS = 3
OFF = 1e-6


def logits() -> Tensor:
    torch.manual_seed(2)
    return torch.randn(ROWS, WIDTH)


def spread(count: int, each: int, noise: float = 0.0) -> Tensor:
    """Rows of which `each` neighbours are large in every one of `count` lines."""
    rows = logits() - 6
    for n in range(count):
        begin = n // 8 * TUNING.min_chunk + n % 8 * 16
        rows[:, begin : begin + each] = 9 + noise * rows[:, begin : begin + each]
    return rows


CASES: dict[str, tuple[Tensor, float, float]] = {
    "few numbers": (logits() * 6, 0.95, 0.0),
    "the largest": (logits() * 6, 0.0, 0.0),
    "nearly all of few": (logits() * 9, 0.99999, 0.0),
    "several lines": (spread(120, 1, 0.1), 0.9, 0.0),
    "equal ones of few lines": (spread(30, 16), 0.0513, 0.0),
    "equal ones of several lines": (spread(100, 5), 0.1613, 0.0),
    "more lines than are looked at": (logits() * 2, 0.95, 0.0),
    "most numbers": (logits() * 0.3, 0.9, 0.0),
    "most of equal numbers": ((logits() * 3).round() / 8, 0.7003, 0.0),
    "nearly all": (logits(), 0.99999, 0.0),
    "what is not small, few": (logits() * 6, 1.0, 0.03),
    "what is not small, many": (logits(), 1.0, 0.03),
    "a share of many that is not small": (logits(), 0.8, 0.2),
    "a share of few that is not small": (logits() * 6, 0.9, 0.02),
}

ALIKE = {
    "the largest",
    "equal ones of few lines",
    "more lines than are looked at",
    "nearly all",
    "what is not small, few",
    "a share of few that is not small",
}
"""Cases with the same code path as others."""


def kept_of(rows: Tensor, share: float, least: float) -> Tensor:
    """Filtered softmax in float64, largest first; ties keep the first tokens."""
    probs = rows.double().softmax(-1)
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    mass = ordered.cumsum(-1)
    kept = (mass - ordered < share) & (ordered >= least * ordered[:, :1])
    kept[:, 0] = True
    return torch.where(torch.zeros_like(kept).scatter(-1, order, kept), probs, 0.0)


def drawn(rows: Tensor, share: float, least: float, uniform: Tensor, device: str) -> Tensor:
    count = torch.zeros(len(rows), dtype=torch.int64)
    filters = (count, *(torch.full((len(rows),), x) for x in (share, least)))
    source = launch.Source(rows.to(device), softmax=True)
    kept = launch.Filters(*(x.to(device) for x in filters))
    return launch.draw(source, kept, None, uniform.to(device), torch.int64).cpu()


@pytest.fixture(autouse=True)
def _on_memory_that_holds_something(launches: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(source: launch.Source, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return source.values.new_full((len(source.values), *shape), -7, dtype=dtype)

    monkeypatch.setattr(launch.Source, "empty", empty)


@pytest.mark.parametrize("programs", [pytest.param(1, marks=pytest.mark.slow), TUNING.programs])
@pytest.mark.parametrize(
    ("rows", "share", "least"),
    [
        pytest.param(*case, id=name, marks=[pytest.mark.slow] if name in ALIKE else [])
        for name, case in CASES.items()
    ],
)
def test_tokens_are_those_of_what_is_kept(
    rows: Tensor, share: float, least: float, programs: int, device: str,
    tuned: Tuned,
) -> None:  # fmt: skip
    tuned(TUNING, programs=programs)
    kept = kept_of(rows, share, least)
    running = kept.cumsum(-1)
    total = running[:, -1]
    # The last uniform number draws the last kept token.
    uniform = torch.tensor([0.0, 0.5, 1 - 2.0**-24])
    tokens = drawn(rows, share, least, uniform, device)
    beyond, own = (x.gather(-1, tokens[:, None])[:, 0] for x in (running, kept))
    wanted = uniform.double() * total
    assert (own > 0).all()
    # Kernels round weights to float32.
    assert (beyond >= wanted - OFF).all()
    assert (beyond - own <= wanted + OFF).all()


@pytest.mark.parametrize("name", ["few numbers", "several lines"])
def test_a_row_alone_draws_as_among_others(name: str, device: str) -> None:
    rows, share, least = CASES[name]
    uniform = torch.tensor([0.3, 0.6, 0.9])
    tokens = drawn(rows, share, least, uniform, device)
    for n in range(ROWS):
        at = slice(n, n + 1)
        assert drawn(rows[at], share, least, uniform[at], device) == tokens[at]
