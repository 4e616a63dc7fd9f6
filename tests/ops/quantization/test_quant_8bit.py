"""8-bit quantization against tables of all codes and exact fractions."""

from __future__ import annotations

import bisect
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from cairn.errors import BadArgument
from cairn.ops import (
    per_token_quant_int8,
    sgl_per_tensor_quant_fp8,
    sgl_per_token_group_quant_8bit,
    sgl_per_token_group_quant_fp8,
    sgl_per_token_group_quant_int8,
    sgl_per_token_quant_fp8,
)
from tests.ops.sampling.variants import runnable_on

E4M3 = torch.float8_e4m3fn
# All finite magnitudes of e4m3 by code, from the format's definition (1-4-3, bias 7).
MAGNITUDES = [
    Fraction(c & 7, 512) if c < 8 else Fraction(8 + (c & 7), 8) * Fraction(2) ** ((c >> 3) - 7)
    for c in range(127)
]


def nearest(x: Fraction) -> Fraction:
    """x rounded to e4m3: to the nearest, ties to the even code; beyond 448 is 448."""
    size = min(abs(x), MAGNITUDES[-1])
    above = bisect.bisect_left(MAGNITUDES, size)
    below = max(above - 1, 0)
    up, down = MAGNITUDES[above] - size, size - MAGNITUDES[below]
    code = above if up < down or (up == down and above % 2 == 0) else below
    return MAGNITUDES[code] if x >= 0 else -MAGNITUDES[code]


def check_codes(x: Tensor, q: Tensor, scale: Tensor, what: str) -> None:
    """At most 1 in 200 codes differ from those of the exact quotient, by one step."""
    wrong = 0
    for value, got, s in zip(x.tolist(), q.float().tolist(), scale.tolist(), strict=True):
        wanted = nearest(Fraction(value) / Fraction(s)) if s else Fraction(0)
        if Fraction(got) != wanted:
            wrong += 1
            step = abs(abs(wanted) - abs(Fraction(got)))
            assert step <= max(abs(wanted) / 8, Fraction(1, 512)), f"{what}: {value} / {s} is {got}"
    assert wrong <= max(1, x.numel() // 200), f"{what}: {wrong} of {x.numel()} codes"


def drawn(shape: tuple[int, ...], dtype: torch.dtype, scale: float = 3.0) -> Tensor:
    g = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=g) * scale).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (7, 63), (5, 250)])
def test_one_scale_for_the_tensor(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    x = drawn(shape, dtype).to(device)
    for name in runnable_on(sgl_per_tensor_quant_fp8, device):
        call = sgl_per_tensor_quant_fp8.using(name)
        q, s = torch.empty_like(x, dtype=E4M3), torch.full((1,), torch.nan, device=device)
        call(x, q, s, False)
        assert torch.equal(s.cpu(), (x.cpu().float().abs().max() / 448).view(1)), name
        check_codes(x.flatten(), q.flatten(), s.expand(x.numel()), name)
        given = torch.tensor([0.004], device=device)
        call(x, q, given, True)
        assert float(given) == pytest.approx(0.004)
        check_codes(x.flatten(), q.flatten(), given.expand(x.numel()), name)


def test_every_code_and_every_middle(device: str) -> None:
    middles = [(a + b) / 2 for a, b in itertools.pairwise(MAGNITUDES)]
    near = [m * (1 + Fraction(sign, 1 << 20)) for m in middles for sign in (-1, 1)]
    values = [*MAGNITUDES, *middles, *near, Fraction(460), Fraction(10**6)]
    values += [-value for value in values]
    x = torch.tensor([float(value) for value in values], device=device)
    exact = [float(nearest(Fraction(value))) for value in x.tolist()]
    for name in runnable_on(sgl_per_tensor_quant_fp8, device):
        q = torch.empty_like(x, dtype=E4M3)
        sgl_per_tensor_quant_fp8.using(name)(x, q, torch.ones(1, device=device), True)
        assert q.float().tolist() == exact, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [1, 63, 1000])
def test_a_scale_for_each_row(width: int, dtype: torch.dtype, device: str) -> None:
    x = drawn((4, 2 * width), dtype)[:, :width]
    x[2] = 0
    x = x.to(device)
    for name in runnable_on(sgl_per_token_quant_fp8, device):
        for shape in ((4,), (4, 1)):
            q = torch.empty(4, width, dtype=E4M3, device=device)
            s = torch.full(shape, torch.nan, device=device)
            sgl_per_token_quant_fp8.using(name)(x, q, s)
            assert torch.equal(s.flatten().cpu(), x.cpu().float().abs().amax(1) / 448), name
        assert int(q[2].view(torch.uint8).max()) == 0
        check_codes(x.flatten(), q.flatten(), s.expand(4, width).flatten(), name)


def test_extremes_of_a_row() -> None:
    x = torch.tensor([[math.nan, 1.0], [math.inf, 1.0], [1e-44, 0.0], [-3e38, 3e38]])
    for name in runnable_on(sgl_per_token_quant_fp8, "cpu"):
        q, s = torch.empty(4, 2, dtype=E4M3), torch.empty(4)
        sgl_per_token_quant_fp8.using(name)(x, q, s)
        assert s[:2].isnan().tolist() == [True, False] and s[1] == math.inf
        assert q[0].isnan().all(), name
        assert q[1].isnan().tolist() == [True, False], name
        assert q[2].float().isfinite().all() and q[2, 1].float() == 0, name
        assert q[3].float().tolist() == [-448.0, 448.0], name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("group", [16, 21, 128])
def test_a_scale_for_each_group(group: int, dtype: torch.dtype, device: str) -> None:
    groups = 3
    x = drawn((5, group * groups), dtype)
    x[1, :group] = 0
    wanted = x.float().unflatten(1, (groups, group)).abs().amax(-1).clamp(min=1e-10) / 448
    for name in runnable_on(sgl_per_token_group_quant_fp8, device):
        for column_major in (False, True):
            q = torch.empty(x.shape, dtype=E4M3, device=device)
            s = torch.empty(5, groups, device=device)
            if column_major:
                s = torch.full((groups, 8), torch.nan, device=device).t()[:5]
            sgl_per_token_group_quant_fp8.using(name)(x.to(device), q, s, group)
            torch.testing.assert_close(s.cpu(), wanted, rtol=2**-23, atol=0)
            each = s.repeat_interleave(group, 1).flatten().cpu()
            check_codes(x.flatten(), q.flatten().cpu(), each, name)


def test_int8_groups_are_cut_towards_zero(device: str) -> None:
    x = drawn((6, 96), torch.bfloat16)
    for name in runnable_on(sgl_per_token_group_quant_int8, device):
        q = torch.empty(6, 96, dtype=torch.int8, device=device)
        s = torch.empty(6, 3, device=device)
        sgl_per_token_group_quant_int8.using(name)(x.to(device), q, s, 32, 1e-10, -128, 127)
        scale = s.repeat_interleave(32, 1).cpu().numpy()
        wanted = np.trunc(np.divide(x.float().numpy(), scale, dtype=np.float32))
        assert (q.cpu().numpy() == wanted).all(), name


def test_bounds_of_int8_codes_by_their_own_names(device: str) -> None:
    x = drawn((2, 32), torch.float32).to(device)
    q, s = torch.empty(2, 32, dtype=torch.int8, device=device), torch.empty(2, 2, device=device)
    sgl_per_token_group_quant_int8(x, q, s, 16, int8_min=-5, int8_max=7)
    assert (q.min().item(), q.max().item()) == (-5, 7)


@pytest.mark.parametrize("groups", [1, 4, 6])
def test_exponents_share_words(groups: int, device: str) -> None:
    x = drawn((5, 16 * groups), torch.float32, 40.0)
    x[3] = 0
    words = -(-groups // 4)
    largest = x.unflatten(1, (groups, 16)).abs().amax(-1).clamp(min=1e-10)
    for name in runnable_on(sgl_per_token_group_quant_fp8, device):
        q = torch.empty(x.shape, dtype=E4M3, device=device)
        s = torch.full((words, 8), -1, dtype=torch.int32, device=device).t()[:5]
        sgl_per_token_group_quant_fp8.using(name)(x.to(device), q, s, 16, scale_ue8m0=True)
        for row, col in ((r, c) for r in range(5) for c in range(4 * words)):
            byte = (int(s[row, col // 4]) >> 8 * (col % 4)) & 255
            wanted = 0
            if col < groups:
                wanted = math.ceil(math.log2(float(largest[row, col] / 448))) + 127
            assert byte == wanted, (name, row, col)
        # Division by a power of two is exact, so all codes are exact.
        scale = 2.0 ** torch.ceil(torch.log2(largest / 448))
        scaled = x / scale.repeat_interleave(16, 1)
        for value, got in zip(scaled.flatten().tolist(), q.flatten().tolist(), strict=True):
            assert Fraction(got) == nearest(Fraction(value)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_only_rows_in_use_are_written(dtype: torch.dtype, device: str) -> None:
    x = drawn((3, 4, 2 * 32), dtype)
    used = torch.tensor([4, 0, 1], dtype=torch.int32)
    gate, up = (part.double() for part in x.chunk(2, -1))
    silu = (gate / (1 + torch.exp(-gate))).to(dtype)
    product = (silu.double() * up).to(dtype)
    for name in runnable_on(sgl_per_token_group_quant_8bit, device):
        if name != "reference" and device == "cpu" and dtype != torch.float32:
            continue  # Interpreted products of half precision are wrong.
        q = torch.full((3, 4, 32), 1.0, device=device).to(E4M3)
        s = torch.full((3, 4, 2), 5.0, device=device)
        sgl_per_token_group_quant_8bit.using(name)(
            *(x.to(device), q, s, 16),
            fuse_silu_and_mul=True,
            masked_m=used.to(device),
        )
        for e, t in ((e, t) for e in range(3) for t in range(4)):
            if t >= int(used[e]):
                assert bool((q[e, t].float() == 1).all()) and bool((s[e, t] == 5).all()), name
                continue
            wanted = product[e, t].float().view(2, 16).abs().amax(1) / 448
            torch.testing.assert_close(s[e, t].cpu(), wanted, rtol=2**-7, atol=0)
            back = q[e, t].float().cpu() * s[e, t].repeat_interleave(16).cpu()
            torch.testing.assert_close(back, product[e, t].float(), rtol=0.08, atol=0.01)


def test_powers_of_two_as_numbers(device: str) -> None:
    x = torch.tensor([[448.0, 0.0], [449.0, 1.0], [0.0, 0.0], [3.0, math.inf]], device=device)
    for name in runnable_on(sgl_per_token_group_quant_8bit, device):
        q, s = torch.empty(4, 2, dtype=E4M3, device=device), torch.empty(4, 1, device=device)
        sgl_per_token_group_quant_8bit.using(name)(x, q, s, 2, eps=0.0, scale_ue8m0=True)
        assert s[:3, 0].tolist() == [1.0, 2.0, 2.0**-127], name
        assert bool(s[3].isnan()), name
        assert q[:3].float().tolist() == [[448.0, 0.0], [224.0, 0.5], [0.0, 0.0]], name


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FC00000, 0x7FFFFFFF, -1, -0x400000])
def test_powers_of_two_of_nan_are_nan(bits: int, device: str) -> None:
    x = torch.tensor([[bits, 0], [0, 0]], dtype=torch.int32, device=device).view(torch.float32)
    for name in runnable_on(sgl_per_token_group_quant_8bit, device):
        call = sgl_per_token_group_quant_8bit.using(name)
        q, s = torch.zeros(2, 2, dtype=E4M3, device=device), torch.zeros(2, 1, device=device)
        call(x, q, s, 2, scale_ue8m0=True)
        assert bool(s[0].isnan()) and bool(q[0].float().isnan().all()), name
        assert bool(s[1].isfinite()) and not int(q[1].float().count_nonzero()), name
        words = torch.zeros(2, 1, dtype=torch.int32, device=device)
        call(x, q, words, 2, scale_ue8m0=True)
        assert int(words[0]) == 255, name


def test_int8_of_what_is_not_finite_is_zero(device: str) -> None:
    x = torch.tensor([[math.nan, 1.0], [math.inf, 1.0]], device=device)
    for name in runnable_on(per_token_quant_int8, device):
        wide = per_token_quant_int8.using(name)(x.bfloat16().repeat(1, 500))[0]
        assert not wide.count_nonzero(), name
        q, s = per_token_quant_int8.using(name)(x)
        assert q.tolist() == [[0, 0], [0, 0]], name
        assert bool(s[0].isnan()) and bool(s[1].isinf()), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_int8_of_products_that_are_rounded_first(dtype: torch.dtype, device: str) -> None:
    # Some products are close to a midpoint and are rounded to it in float32.
    x = drawn((128, 2048), dtype).to(device)
    if dtype == torch.float32:
        x[0] *= 1e-38
    reference, *others = runnable_on(per_token_quant_int8, device)
    codes, scale = per_token_quant_int8.using(reference)(x)
    for name in others:
        q, s = per_token_quant_int8.using(name)(x)
        assert torch.equal(q, codes) and torch.equal(s, scale), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_int8_rows(dtype: torch.dtype, device: str) -> None:
    x = drawn((2, 3, 101), dtype)
    x[1, 0] = 0
    for name in runnable_on(per_token_quant_int8, device):
        q, s = per_token_quant_int8.using(name)(x.to(device))
        assert q.dtype == torch.int8 and s.shape == (2, 3, 1)
        assert torch.equal(s.cpu(), x.float().abs().amax(-1, keepdim=True) / 127), name
        each = s.expand(2, 3, 101).flatten().tolist()
        for value, got, own in zip(x.flatten().tolist(), q.flatten().tolist(), each, strict=True):
            assert abs(got - (value / own if own else 0)) <= 0.5001, name


X, Q, S = torch.zeros(4, 64), torch.zeros(4, 64, dtype=E4M3), torch.zeros(4, 2)


@pytest.mark.parametrize(
    "argument, given",
    [
        ("input", (X.int(), Q, S, 32)),
        ("output_q", (X, Q[:, :32], S, 32)),
        ("output_q", (X, Q.to(torch.float8_e5m2), S, 32)),
        ("output_s", (X, Q, S.half(), 32)),
        ("output_s", (X, Q, S[:2], 32)),
        ("output_s", (X, Q, torch.zeros(4, 1, dtype=torch.int32), 32)),
        ("group_size", (X, Q, S, 33)),
        ("group_size", (X, Q, S, 0)),
        ("fp8_max", (X, Q, S, 32, 1e-10, -1.0, 0.0)),
        ("fp8_max", (X, Q, S, 32, 1e-10, -448.0, 449.0)),
        ("fp8_max", (X, Q, S, 32, 1e-10, -500.0, 448.0)),
        ("fp8_max", (X, Q, S, 32, 1e-10, None, math.nan)),
        ("fp8_max", (X, Q.to(torch.int8), S, 32, 1e-10, -128.0, 128.0)),
        ("output_q", (X, Q.to("meta"), S, 32)),
    ],
)
def test_groups_refuse(argument: str, given: tuple) -> None:
    with pytest.raises(BadArgument, match=f"`{argument}`"):
        sgl_per_token_group_quant_8bit(*given)


def test_others_refuse() -> None:
    used = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(BadArgument, match="`input`"):
        sgl_per_token_group_quant_8bit(X, Q, S, 32, masked_m=used)
    with pytest.raises(BadArgument, match="`output_s`"):
        sgl_per_tensor_quant_fp8(X, Q, S, False)
    with pytest.raises(BadArgument, match="`output_s`"):
        sgl_per_token_quant_fp8(X, Q, S)
    with pytest.raises(BadArgument, match="`input`"):
        sgl_per_token_quant_fp8(X[0], Q[0], S)
    with pytest.raises(BadArgument, match="`x`"):
        per_token_quant_int8(X.double())
