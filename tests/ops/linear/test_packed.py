"""Packed weights: the plain product, batch invariance, torch.compile, and what is not packed."""

from __future__ import annotations

import pytest
import torch

from cairn.ops import packed_linear
from cairn.ops.linear.packed import pack_weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 16, 33])
def test_equals_the_plain_product(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    x, weight, bias = (torch.randn(*s).to(dtype) for s in ((rows, 96), (50, 96), (50,)))
    packed = pack_weight(weight)
    if packed is None:
        pytest.skip("this machine packs no weights of this dtype")
    expected = x.double() @ weight.double().T
    for b, wanted in ((None, expected), (bias, expected + bias.double())):
        got = packed_linear(x, packed, b)
        assert got.dtype == dtype
        assert got.is_contiguous()
        half_unit = torch.finfo(dtype).eps / 2
        torch.testing.assert_close(got.double(), wanted, rtol=half_unit * 1.01 + 1e-6, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_rows_give_the_same_bits_together_and_alone(dtype: torch.dtype) -> None:
    packed = pack_weight(torch.randn(64, 128).to(dtype))
    if packed is None:
        pytest.skip("this machine packs no weights of this dtype")
    x = torch.randn(4, 128).to(dtype)
    together = packed_linear(x, packed)
    for rows in (1, 2, 3):
        assert torch.equal(packed_linear(x[:rows], packed), together[:rows])
    assert torch.equal(packed_linear(x[2], packed), together[2])


@pytest.mark.parametrize("rows", [1, 2])
def test_zeros_without_eps_have_no_norm(rows: int) -> None:
    packed = pack_weight(torch.randn(5, 48))
    assert packed_linear(torch.zeros(rows, 48), packed, None, torch.ones(48), 0.0).isnan().all()
    small = torch.full((rows, 48), 1e-3)
    assert packed_linear(small, packed, None, torch.ones(48), 0.0).isfinite().all()


def test_compiles_without_a_graph_break() -> None:
    weight = torch.randn(16, 64)
    packed = pack_weight(weight)
    packed = weight if packed is None else packed
    x = torch.randn(3, 64)
    compiled = torch.compile(
        lambda x, w: packed_linear(x, w) * 2, fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(x, packed), x @ weight.T * 2)


def test_packing_copies_and_refuses_other_dtypes() -> None:
    assert pack_weight(torch.randn(4, 4).double()) is None
    assert pack_weight(torch.randn(4, 4, device="meta")) is None
    weight = torch.randn(8, 8)
    packed = pack_weight(weight)
    if packed is not None:
        expected = packed_linear(torch.eye(8), packed).clone()
        weight.zero_()
        assert torch.equal(packed_linear(torch.eye(8), packed), expected)


def test_plain_weight_is_accepted() -> None:
    x, weight = torch.randn(2, 3, 8), torch.randn(5, 8)
    assert torch.equal(packed_linear(x, weight), torch.nn.functional.linear(x, weight))
