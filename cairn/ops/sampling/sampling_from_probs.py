"""Draw one token of every row."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.benching import Alternative, Draw, Point, Points, moved
from cairn.ops.registry import op
from cairn.ops.sampling import launch
from cairn.ops.testing import Cases, Make


@op
def sampling_from_probs(probs: Tensor, uniform: Tensor) -> Tensor:
    """The first token, in vocabulary order, whose running mass exceeds uniform * (mass of the row).

    Sums are in float64. A token without mass is never drawn; a row whose mass is zero, infinite or
    NaN gives -1.

    Args:
        probs: [B, V] float32 >= 0, not necessarily normalised.
        uniform: [B] float32 in [0, 1).
    Returns:
        [B] int32.
    """
    running = probs.double().cumsum(dim=-1)
    mass = running[:, -1:]
    token = torch.searchsorted(running, uniform.double()[:, None] * mass, right=True)
    drawable = (mass > 0) & mass.isfinite()
    return torch.where(drawable, token, -1).squeeze(-1).to(torch.int32)


@sampling_from_probs.implementation("triton", devices=gpu.DEVICES, when=launch.accepts)
def _(probs: Tensor, uniform: Tensor) -> Tensor:
    return launch.draw(launch.Source(probs), launch.Filters(), None, uniform, torch.int32)


@sampling_from_probs.cases
def _(make: Make) -> Cases:
    yield make.args(make.probs(64, 301), make.rand(64))
    yield make.args(make.probs(4, 5000, sharpness=6.0), make.rand(4))
    holes = make.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]]).repeat(5, 1)
    yield make.args(holes, make.tensor([0.0, 0.25, 0.5, 0.75, 1 - 2.0**-24]))
    nothing = make.tensor([[0.0, 0.0], [float("nan"), 1.0], [1.0, float("inf")], [0.0, 3.0]])
    yield make.args(nothing, make.rand(4))
    yield make.args(make.probs(0, 9), make.rand(0))


@sampling_from_probs.bench
def _(draw: Draw) -> Points:
    for rows, vocabulary in draw.logits():
        probs, uniform = draw.probs(rows, vocabulary, 3.0), draw.rand(rows)
        others = (
            Alternative("multinomial", lambda probs, _: torch.multinomial(probs, 1)),
            *draw.compiled(sampling_from_probs.reference),
        )
        size = f"{rows} x {vocabulary}"
        yield Point(size, draw.args(probs, uniform), moved(probs), alternatives=others)
