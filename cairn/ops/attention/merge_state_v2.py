"""Two attention results over disjoint keys become one."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.benching import Draw, Point, Points, moved
from cairn.ops.registry import op
from cairn.ops.testing import Cases, Make


@op
def merge_state_v2(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """Weigh two results by e^s and add them; float32 inside, v rounded once.

    Args:
        v_a, v_b: [n, h, d], one dtype.
        s_a, s_b: [n, h] float32, log-sum-exp (natural logarithm) of the logits behind v. Infinite
            means no key: that part's v is not read into the sum. Both empty: v = 0, s = -inf.
    Returns:
        (v, s) of the same shapes and dtypes.
    """
    a, b = (s.masked_fill(s.isinf(), -torch.inf) for s in (s_a, s_b))
    merged = torch.logaddexp(a, b)
    shift = merged.clamp(min=torch.finfo(torch.float32).min)
    parts = [
        torch.where(s.isinf().unsqueeze(-1), 0.0, v.float()) * (s - shift).exp().unsqueeze(-1)
        for v, s in ((v_a, a), (v_b, b))
    ]
    return (parts[0] + parts[1]).to(v_a.dtype), merged


@merge_state_v2.cases
def _(make: Make) -> Cases:
    empty = make.full((5, 3), -torch.inf)
    for dtype in (torch.float32, torch.bfloat16):
        v_a, v_b = (make.randn(5, 3, 16, dtype=dtype) for _ in range(2))
        s_a, s_b = (make.randn(5, 3, scale=20.0) for _ in range(2))
        yield make.args(v_a, s_a, v_b, s_b)
        yield make.args(v_a, s_a, make.empty(5, 3, 16, dtype=dtype), empty)
        yield make.args(v_a, empty, v_b, -empty)
        yield make.args(v_a[:0], s_a[:0], v_b[:0], s_b[:0])


@merge_state_v2.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.rows():
        shape = (rows, layer.heads, layer.head_dim)
        v_a, v_b = (draw.randn(*shape) for _ in range(2))
        s_a, s_b = (draw.randn(*shape[:2], dtype=torch.float32) for _ in range(2))
        yield Point(
            f"{layer.name}: {rows} x {layer.heads} x {layer.head_dim}",
            draw.args(v_a, s_a, v_b, s_b),
            moved(v_a, v_a, v_b, s_a, s_a, s_b),
            alternatives=draw.compiled(merge_state_v2.reference),
        )
