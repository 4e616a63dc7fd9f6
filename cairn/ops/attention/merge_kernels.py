"""Kernels that merge attention states of disjoint keys, weighted by exp of their log-sum-exp."""

from __future__ import annotations

from cairn.ops.attention.kernels import load_rows, store_rows
from cairn.ops.gpu import tl, triton
from cairn.ops.pdl import await_previous, launch_next


@triton.jit(early=(), do_not_specialize=["splits"])
def merge_kernel(
    part_o, part_lse, o, lse, splits,
    DIM: tl.constexpr, DP: tl.constexpr, SPLITS: tl.constexpr,
    SOFTMAX1: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge the splits of DP columns of one (token, head): attention states weighed by their lse.

    Args:
        SPLITS: splits, padded to a power of two.
        SOFTMAX1: an additional state with o = 0 and lse = 0 is merged.
        lse: without that state; or None.
        PDL: as in `await_previous`.
    """
    launch_next(PDL)
    await_previous(PDL)
    place = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, SPLITS)
    d = tl.program_id(1) * DP + tl.arange(0, DP)
    logs = tl.load(part_lse + place * splits + s, mask=s < splits, other=float("-inf"))
    # An empty state has an lse of -inf; its output may be uninitialised and is not loaded.
    shown = (logs != float("-inf"))[:, None] & (d < DIM)[None, :]
    part = tl.load(part_o + ((place * splits + s) * DIM)[:, None] + d[None, :], shown, 0.0)
    best = tl.max(logs, 0)
    if SOFTMAX1:
        best = tl.maximum(best, 0.0)
    base = tl.where(best == float("-inf"), 0.0, best)
    weight = tl.exp(logs - base)
    total = tl.sum(weight, 0)
    if SOFTMAX1:
        total += tl.exp(-base)
    safe = tl.where(total != 0, total, 1.0)
    merged = tl.sum(part * weight[:, None], 0) / safe
    tl.store(o + place * DIM + d, merged.to(o.dtype.element_ty), mask=d < DIM)
    if lse is not None:
        first = tl.program_id(1) == 0
        tl.store(lse + place, tl.where(total != 0, base + tl.log(safe), float("-inf")), mask=first)


@triton.jit(do_not_specialize=["lines"])
def merge_states_kernel(
    v_a, s_a, v_b, s_b, v, s, lines,
    DIM: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, BASE2: tl.constexpr,
):  # fmt: skip
    """v [lines, DIM] and s [lines]: two states weighed by their log-sum-exp; infinite: empty."""
    line = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    alive = line < lines
    unit: tl.constexpr = 1.0 if BASE2 else 1.4426950408889634
    infinite = float("inf")
    a = tl.load(s_a + line, mask=alive, other=-infinite) * unit
    b = tl.load(s_b + line, mask=alive, other=-infinite) * unit
    a = tl.where(a == infinite, -infinite, a)
    b = tl.where(b == infinite, -infinite, b)
    best = tl.maximum(a, b)
    base = tl.where(best == -infinite, 0.0, best)
    weight_a = tl.exp2(a - base)
    weight_b = tl.exp2(b - base)
    total = weight_a + weight_b
    share = 1.0 / tl.where(total != 0, total, 1.0)
    at = line.to(tl.int64) * DIM
    first = load_rows(v_a + at, alive & (a > -infinite), DIM, DP).to(tl.float32)
    second = load_rows(v_b + at, alive & (b > -infinite), DIM, DP).to(tl.float32)
    value = first * (weight_a * share)[:, None] + second * (weight_b * share)[:, None]
    store_rows(v + at, value, alive, DIM, DP)
    joined = (base + tl.log2(tl.where(total != 0, total, 1.0))) / unit
    tl.store(s + line, tl.where(total != 0, joined, -infinite), mask=alive)
