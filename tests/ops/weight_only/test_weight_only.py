"""Products with packed weights against float64 products with the unpacked values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from cairn import ops
from cairn.errors import BadArgument
from cairn.ops.quantization.codes import E4M3
from cairn.ops.weight_only.packing import pack, unpack
from cairn.ops.weight_only.scalar_type import NAMED
from tests.ops.weight_only import packers

K, N, GROUPS = 128, 64, 4


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got.double(), wanted, rtol=2e-5, atol=2e-5)


def scales(groups: int = GROUPS) -> Tensor:
    return 0.01 + 0.02 * torch.rand(groups, N)


def wide(values: np.ndarray | Tensor, groups: Tensor | None = None) -> Tensor:
    """Expand values per group to values per row."""
    by_group = torch.as_tensor(values).double()
    at = torch.arange(K) // (K // len(by_group)) if groups is None else groups.long()
    return by_group[at]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_words_hold_what_was_packed(bits: int, rng: np.random.Generator) -> None:
    codes = rng.integers(0, 1 << bits, (96, 5))
    words = packers.along_rows(codes, bits)
    assert torch.equal(unpack(words, bits, 0), torch.from_numpy(codes).int())
    assert torch.equal(pack(torch.from_numpy(codes), bits, 0), words)


def test_awq(rng: np.random.Generator) -> None:
    codes, zeros, s = rng.integers(0, 16, (K, N)), rng.integers(0, 16, (GROUPS, N)), scales()
    packed = packers.awq(codes), s, packers.awq(zeros)
    weight = (torch.from_numpy(codes) - wide(zeros)) * wide(s)
    x = torch.randn(5, K)
    close(ops.awq_dequantize(*packed), weight)
    close(ops.awq_gemm(x, *packed), x.double() @ weight)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("order", ["groups", "act order", "shuffled", "shuffled act order"])
def test_gptq(bits: int, order: str, rng: np.random.Generator) -> None:
    codes = rng.integers(0, 1 << bits, (K, N))
    zeros, s = rng.integers(1, 1 << bits, (GROUPS, N)), scales()
    groups = torch.arange(K) // (K // GROUPS)
    if "act order" in order:
        groups = groups[torch.from_numpy(rng.permutation(K))]
    weight = (torch.from_numpy(codes) - wide(zeros, groups)) * wide(s, groups)
    words, index = packers.along_rows(codes, bits), groups.int()
    if "shuffled" in order:
        index = torch.argsort(groups, stable=True).int() if "act" in order else index[:0]
        ops.gptq_shuffle(words, index, bits)
    x = torch.randn(3, K)
    given = (words, packers.along_columns(zeros - 1, bits), s, index, "shuffled" in order, bits)
    close(ops.gptq_gemm(x, *given), x.double() @ weight)


def test_gptq_shuffle_splits_words_into_even_and_odd_rows() -> None:
    words = packers.along_rows(np.arange(8)[:, None], 4)
    ops.gptq_shuffle(words, torch.empty(0, dtype=torch.int32), 4)
    assert int(words) == 0x75316420


@pytest.mark.parametrize("bits", [4, 8])
def test_repacks_give_marlins_layout(bits: int, rng: np.random.Generator) -> None:
    codes, order = rng.integers(0, 1 << bits, (K, N)), torch.from_numpy(rng.permutation(K)).int()
    wanted, plain = packers.marlin(codes, bits), order[:0]
    words = packers.along_rows(codes, bits)
    assert torch.equal(ops.gptq_marlin_repack(words, plain, K, N, bits), wanted)
    sorted_rows = packers.marlin(codes[order.numpy()], bits)
    assert torch.equal(ops.gptq_marlin_repack(words, order, K, N, bits), sorted_rows)
    if bits == 4:
        columns = packers.awq(codes)
        assert torch.equal(ops.awq_marlin_repack(columns, K, N, bits), wanted)
        both = torch.stack((columns, columns.flip(0)))
        got = ops.awq_marlin_moe_repack(both, None, K, N, bits)
        assert torch.equal(got, torch.stack((wanted, packers.marlin(codes[::-1], bits))))


def marlin(x: Tensor, words: Tensor, s: Tensor, kind: str, **given: Tensor | bool) -> Tensor:
    rest = {name: given.get(name) for name in ("global_scale", "b_zeros", "g_idx", "perm")}
    return ops.gptq_marlin_gemm(
        x, None, words, s, *rest.values(), None, NAMED[kind].id, len(x), N, K,
        is_zp_float=given.get("is_zp_float", False),
    )  # fmt: skip


@pytest.mark.parametrize("kind, bits", [("uint4b8", 4), ("uint8b128", 8)])
@pytest.mark.parametrize("groups", [1, GROUPS])
def test_marlin_without_zero_points(
    kind: str, bits: int, groups: int, rng: np.random.Generator
) -> None:
    codes, s, x = rng.integers(0, 1 << bits, (K, N)), scales(groups), torch.randn(3, K)
    weight = (torch.from_numpy(codes) - (1 << (bits - 1))) * wide(s)
    packed = packers.marlin(codes, bits), packers.marlin_scales(s)
    close(marlin(x, *packed, kind), x.double() @ weight)
    out = torch.empty(3, N)
    kind_as_object = type("Kind", (), {"id": NAMED[kind].id})
    got = ops.gptq_marlin_gemm(
        x, out, *packed, None, None, None, None, None, kind_as_object, 3, N, K
    )
    assert got is out
    close(out, x.double() @ weight)


def test_marlin_with_zero_points_and_act_order(rng: np.random.Generator) -> None:
    codes, zeros, s = rng.integers(0, 16, (K, N)), rng.integers(0, 16, (GROUPS, N)), scales()
    x = torch.randn(3, K)
    words, permuted = packers.marlin(codes, 4), packers.marlin_scales(s)
    weight = (torch.from_numpy(codes) - wide(zeros)) * wide(s)
    got = marlin(x, words, permuted, "uint4", b_zeros=packers.marlin_zeros(zeros, 4))
    close(got, x.double() @ weight)
    z = torch.randn(GROUPS, N)
    weight = (torch.from_numpy(codes) - wide(z)) * wide(s)
    given = {"b_zeros": packers.marlin_scales(z), "is_zp_float": True}
    close(marlin(x, words, permuted, "uint4", **given), x.double() @ weight)
    groups = torch.from_numpy(rng.permutation(K)) // (K // GROUPS)
    order = torch.argsort(groups, stable=True)
    weight = (torch.from_numpy(codes) - 8) * wide(s, groups)
    words = packers.marlin(codes[order.numpy()], 4)
    got = marlin(x, words, permuted, "uint4b8", g_idx=groups[order].int(), perm=order.int())
    close(got, x.double() @ weight)


def test_marlin_of_floating_point_codes(rng: np.random.Generator) -> None:
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    codes, x = rng.integers(0, 16, (K, N)), torch.randn(3, K)
    value = torch.tensor([table[c & 7] * (-1 if c & 8 else 1) for c in codes.ravel()]).view(K, N)
    s = torch.randn(8, N).to(E4M3)
    weight = value.double() * wide(s.float()) * 0.25
    permuted = packers.marlin_scales(s.view(torch.uint8)).view(E4M3)
    words = packers.marlin(codes, 4)
    got = marlin(x, words, permuted, "float4_e2m1f", global_scale=torch.tensor([0.25]))
    close(got, x.double() @ weight)
    value = torch.randn(K, N).to(E4M3)
    words = packers.marlin(value.view(torch.uint8).numpy(), 8)
    got = marlin(x, words, packers.marlin_scales(scales(1)), "float8_e4m3fn")
    assert got.shape == (3, N)


def test_marlin_of_experts(rng: np.random.Generator) -> None:
    experts, top, block = 3, 2, 4
    codes = rng.integers(0, 16, (experts, K, N))
    s, bias, x = (
        torch.stack([scales() for _ in range(experts)]),
        torch.randn(experts, N),
        torch.randn(5, K),
    )
    ids = torch.from_numpy(rng.integers(-1, experts, (5, top))).int()
    share = torch.rand(5, top)
    order = torch.empty(10 + (experts + 1) * (block - 1), dtype=torch.int32)
    owners, used = torch.empty(-(-len(order) // block), dtype=torch.int32), torch.empty(1).int()
    scratch = torch.empty(experts + 2, dtype=torch.int32)
    ops.moe_align_block_size(ids, experts + 1, block, order, owners, used, scratch, True)
    words = torch.stack([packers.marlin(c, 4) for c in codes])
    permuted = torch.stack([packers.marlin_scales(one) for one in s])
    got = ops.moe_wna16_marlin_gemm(
        x, None, words, bias, permuted, None, None, None, None, None, order, owners, used, share,
        block, top, True, True, NAMED["uint4b8"].id, 5, N, K,
    )  # fmt: skip
    wanted = torch.zeros(10, N, dtype=torch.float64)
    for place, expert in enumerate(ids.flatten().tolist()):
        if expert >= 0:
            weight = (torch.from_numpy(codes[expert]) - 8) * wide(s[expert])
            y = x[place // top].double() @ weight + bias[expert]
            wanted[place] = y * share.flatten()[place]
    close(got, wanted)


def test_qserve(rng: np.random.Generator) -> None:
    codes = rng.integers(0, 16, (96, 256)).astype(np.uint8)
    x = torch.from_numpy(rng.integers(-128, 128, (5, 256)).astype(np.int8))
    ws, as_, sums = torch.rand(96).half() / 1024, torch.rand(5).half(), torch.randn(5).half()
    szs = (ws.float() * 7).half()
    acc = x.double() @ torch.from_numpy(codes).double().T
    scaled = acc * ws.double() * as_.double()[:, None]
    got = ops.qserve_w4a8_per_chn_gemm(x, packers.qserve(codes), ws, as_, szs, sums)
    wanted = scaled - szs.double() * sums.double()[:, None]
    torch.testing.assert_close(got.double(), wanted, rtol=1e-3, atol=1e-2)
    s8 = rng.integers(1, 17, (2, 96)).astype(np.int8)
    z8 = (-7 * s8.astype(np.int32)).astype(np.int8)
    weight = codes.astype(np.int32) * s8.T.repeat(128, 1) + z8.T.repeat(128, 1)
    acc = x.double() @ torch.from_numpy(weight.astype(np.int8)).double().T
    given = packers.qserve_groups(z8), packers.qserve_groups(s8), ws, as_
    got = ops.qserve_w4a8_per_group_gemm(x, packers.qserve(codes), *given)
    wanted = acc * ws.double() * as_.double()[:, None]
    torch.testing.assert_close(got.double(), wanted, rtol=1e-3, atol=1e-5)


def test_inconsistent_arguments_are_refused() -> None:
    words, s = torch.zeros(8, 256, dtype=torch.int32), torch.ones(1, N)
    with pytest.raises(BadArgument, match="`b_q_type` is 7, not the number of a known type"):
        ops.gptq_marlin_gemm(
            torch.zeros(1, K), None, words, s, None, None, None, None, None, 7, 1, N, K
        )
    with pytest.raises(BadArgument, match="`size_n` is 48, not a positive multiple of 64"):
        ops.gptq_marlin_repack(words, words[0, :0], K, 48, 4)
    with pytest.raises(BadArgument, match="`bit` is 5, not 2, 3, 4 or 8"):
        ops.gptq_shuffle(words, words[0, :0], 5)
