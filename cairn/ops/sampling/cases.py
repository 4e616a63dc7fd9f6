"""Test cases of this family's ops."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.checks import FLOATS
from cairn.ops.sampling.apply_logit_bias import apply_logit_bias
from cairn.ops.sampling.apply_penalties import apply_penalties
from cairn.ops.sampling.argmax_tokens import argmax_tokens
from cairn.ops.sampling.counter_uniform import counter_uniform
from cairn.ops.sampling.draw_from_probs import draw_from_probs
from cairn.ops.sampling.draw_tokens import draw_tokens
from cairn.ops.sampling.min_p_renorm_probs import min_p_renorm_probs
from cairn.ops.sampling.score_tokens import score_tokens
from cairn.ops.sampling.top_k_mask_logits import top_k_mask
from cairn.ops.sampling.top_k_renorm_probs import top_k_renorm
from cairn.ops.sampling.top_k_top_p_sampling_from_logits import draw_from_logits
from cairn.ops.sampling.top_p_renorm_probs import top_p_renorm
from cairn.ops.testing import Cases, Make


@apply_logit_bias.cases
def _(make: Make) -> Cases:
    index = make.tensor([[0, 3], [2, 0], [2, 6], [0, 3]], dtype=torch.int64)
    yield make.args(make.randn(3, 7), index, make.tensor([1.5, -100.0, float("-inf"), 0.25]))
    yield make.args(make.randn(2, 5), index[:0], make.randn(0))


@apply_penalties.cases
def _(make: Make) -> Cases:
    for rows, vocabulary in ((1, 5), (4, 301), (0, 7)):
        yield make.args(
            make.randn(rows, vocabulary, scale=3.0),
            make.randint(0, 2, rows, vocabulary).bool(),
            make.randint(0, 3, rows, vocabulary, dtype=torch.int32),
            make.randn(rows),
            make.randn(rows),
            make.rand(rows) + 0.5,
        )
    hidden = make.tensor([[float("-inf"), 1.0, -1.0]])
    counts, one = make.tensor([[2, 1, 0]], dtype=torch.int32), make.full((1,), 1.0)
    yield make.args(hidden, make.full((1, 3), 1, dtype=torch.bool), counts, one, one, one * 2)


@argmax_tokens.cases
def _(make: Make) -> Cases:
    inf, nan = float("inf"), float("nan")
    odd = [[-inf, nan, 1.0], [-inf, -inf, -inf], [-inf, -2.0, -2.0], [0.0, inf, inf]]
    yield make.args(make.tensor([*odd, [nan, -inf, inf], [1.0, 1.0, 1.0]]))
    yield make.args(make.randint(0, 9, 3, 2500).float())
    yield make.args(make.randn(2, 301)[:, 100:])
    yield make.args(make.randn(0, 9))


@counter_uniform.cases
def _(make: Make) -> Cases:
    yield make.args(make.randint(-(1 << 62), 1 << 62, 257), make.randint(0, 1 << 40, 257))
    extremes = make.tensor([0, -1, (1 << 63) - 1, -(1 << 63)], dtype=torch.int64)
    yield make.args(extremes, extremes)
    yield make.args(make.arange(0), make.arange(0))


@draw_from_probs.cases
def _(make: Make) -> Cases:
    yield make.args(make.probs(64, 301), make.rand(64))
    yield make.args(make.probs(4, 5000, sharpness=6.0), make.rand(4))
    holes = make.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]]).repeat(5, 1)
    yield make.args(holes, make.tensor([0.0, 0.25, 0.5, 0.75, 1 - 2.0**-24]))
    nothing = make.tensor([[0.0, 0.0], [float("nan"), 1.0], [1.0, float("inf")], [0.0, 3.0]])
    yield make.args(nothing, make.rand(4))
    yield make.args(make.probs(0, 9), make.rand(0))
    probs, uniform = make.probs(5, 700, sharpness=3.0), make.rand(5)
    k = make.tensor([1, 7, 0, 40, 700], torch.int32)
    p = make.tensor([0.9, 0.8, 0.3, 1.0, 0.95])
    for joint in (False, True):
        yield make.args(probs, uniform, k, p, joint=joint)
    for rows in (probs, make.probs(5, 3000, sharpness=1.0)):
        yield make.args(rows, uniform, None, p)
    yield make.args(probs, uniform, min_p=p * 0.2)
    which = make.tensor([3, 0, 0, 4, 1, 1, 2, 3], torch.int32)
    yield make.args(probs, make.rand(8), k, p, None, which)
    yield make.args(probs, make.rand(8), indices=which.long())
    yield make.args(probs, make.rand(0), None, p, None, which[:0])


@draw_tokens.cases
def _(make: Make) -> Cases:
    def rows(*parameters: tuple[float, int, float, float]) -> tuple[Tensor, ...]:
        temperature, top_k, top_p, min_p = zip(*parameters, strict=True)
        seeds = make.randint(-(1 << 62), 1 << 62, len(parameters))
        return (
            *(make.tensor(temperature), make.tensor(top_k, dtype=torch.int64)),
            *(make.tensor(top_p), make.tensor(min_p), seeds, make.arange(len(parameters))),
        )

    every = ((0.0, 3, 0.5, 0.1), (0.7, 50, 0.9, 0.0), (1.0, -1, 1.0, 0.0), (1e30, 2, 1.0, 0.0))
    yield make.args(make.randn(4, 301, scale=3.0), *rows(*every))
    filters = ((1.0, 301, 0.9, 0.0), (1.0, 0, 1.0, 0.1), (0.5, 5, 1.0, 0.0), (1.5, 9, 0.8, 0.2))
    yield make.args(make.randn(4, 2500, scale=2.0), *rows(*filters))
    flat = ((1.0, -1, 0.9, 0.0), (1.0, 4000, 0.95, 0.0), (1.0, 5000, 0.999, 0.01))
    yield make.args(make.randn(3, 5000), *rows(*flat))
    inf, nan = float("inf"), float("nan")
    odd = [[nan, 1.0, 2.0], [-inf, -inf, -inf], [inf, 0.0, 1.0], [-inf, 0.0, -inf]]
    drawn = ((1.0, -1, 1.0, 0.0), (1.0, 2, 0.5, 0.0), (1.0, -1, 0.9, 0.0), (1.0, 2, 0.9, 0.1))
    yield make.args(make.tensor(odd), *rows(*drawn))
    yield make.args(make.tensor(odd), *rows(*[(0.0, -1, 1.0, 0.0)] * 4))
    tied = make.tensor([[2.0, 0.0, 2.0, 2.0, 2.0]]).repeat(3, 1)
    yield make.args(tied, *rows((1.0, 1, 1.0, 0.0), (1.0, 2, 0.5, 0.0), (1.0, -1, 0.3, 1.0)))
    nothing = make.randn(0)
    none = make.arange(0)
    yield make.args(make.randn(0, 9), nothing, none, nothing, nothing, none, none)


@min_p_renorm_probs.cases
def _(make: Make) -> Cases:
    yield make.args(make.probs(4, 301), make.tensor([0.0, 0.05, 0.5, 1.0]))
    yield make.args(make.tensor([[0.5, 0.25, 0.25]]), make.tensor([0.5]))
    yield make.args(make.probs(0, 9), make.tensor([]))


@score_tokens.cases
def _(make: Make) -> Cases:
    yield make.args(make.tensor([[0.0, 0.0, float("-inf")]]), make.randint(0, 2, 1))
    yield make.args(make.randn(3, 9001) * 3, make.randint(0, 9001, 3))
    yield make.args(make.randn(2, 301)[:, 100:], make.randint(0, 201, 2))
    yield make.args(make.randn(0, 9), make.randint(0, 9, 0))


@top_k_mask.cases
def _(make: Make) -> Cases:
    inf, nan = float("inf"), float("nan")
    k = make.tensor([1, 2, 50, 301, 1000, 0], torch.int64)
    yield make.args(make.randn(6, 301), k)
    for dtype in FLOATS:
        ties = make.randint(-9, 9, 3, 63).to(dtype)
        yield make.args(ties, make.tensor([7, 1, 62], torch.int32))
    odd = [[0.0, -0.0, 1.0, -1.0], [inf, -inf, 2.0, inf], [-inf, -inf, -inf, 1e-40]]
    yield make.args(make.tensor([*odd, [-1e-45, 0.0, -2.0, -3.0]]), make.tensor([2, 3, 2, 2]).int())
    yield make.args(make.randn(2, 5100)[:, 17:5050], make.tensor([40, 4000], torch.int32))
    yield make.args(make.tensor([[nan, 1.0, 2.0], [nan, nan, 1.0]]), make.tensor([2, 1]).int())
    yield make.args(make.randn(0, 9), k[:0])


@top_k_renorm.cases
def _(make: Make) -> Cases:
    integers = torch.int64
    yield make.args(make.probs(6, 301), make.tensor([1, 2, 50, 301, 1000, 0], dtype=integers))
    yield make.args(make.probs(2, 5000, sharpness=4.0), make.tensor([40, 5], dtype=torch.int32))
    yield make.args(make.probs(2, 64), make.tensor([-1, 64], dtype=integers))
    tied = make.tensor([[0.25, 0.25, 0.25, 0.25], [0.125, 0.5, 0.125, 0.25], [0.0, 1.0, 0.0, 0.0]])
    yield make.args(tied, make.tensor([2, 3, 2], dtype=integers))
    yield make.args(make.probs(0, 9), make.tensor([], dtype=integers))


@draw_from_logits.cases
def _(make: Make) -> Cases:
    yield make.args(make.randn(6, 301, scale=3.0), make.rand(6))
    logits, uniform = make.randn(5, 700, scale=3.0), make.rand(5)
    k = make.tensor([1, 7, 0, 40, 700], torch.int32)
    p = make.tensor([0.9, 0.8, 0.3, 1.0, 0.95])
    for joint in (False, True):
        yield make.args(logits, uniform, k, p, joint)
    for dtype in (torch.bfloat16, torch.float16):
        yield make.args(logits.to(dtype), uniform, k.long(), p)
    inf, nan = float("inf"), float("nan")
    odd = make.tensor([[nan, 1.0, 2.0], [-inf, -inf, -inf], [inf, 0.0, 1.0], [-inf, 0.0, -inf]])
    yield make.args(odd, make.rand(4), k[:4], p[:4])
    yield make.args(make.randn(0, 9), make.rand(0), k[:0], p[:0])


@top_p_renorm.cases
def _(make: Make) -> Cases:
    yield make.args(make.probs(6, 301), make.tensor([0.9, 0.5, 1e-6, 1.0, 0.0, 2.0]))
    yield make.args(make.probs(3, 9001, sharpness=4.0), make.tensor([0.9, 0.99, 0.2]))
    yield make.args(make.probs(2, 9001, sharpness=0.1), make.tensor([0.95, 0.01]))
    quarter = make.full((4, 4), 0.25)
    yield make.args(quarter, make.tensor([0.5, 0.51, 0.25, 0.75]))
    tied = make.tensor([[0.125, 0.5, 0.125, 0.25], [0.125, 0.125, 0.0, 0.75], [0.0, 1.0, 0.0, 0.0]])
    yield make.args(tied, make.tensor([0.8, 0.8, 0.999]))
    yield make.args(make.full((2, 600), 1 / 600), make.tensor([0.5, 0.9]))
    yield make.args(make.full((2, 1), 1.0), make.tensor([0.5, 1.0]))
    yield make.args(make.probs(0, 9), make.tensor([]))
