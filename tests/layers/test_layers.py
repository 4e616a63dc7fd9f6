"""Linear, norm, embedding and MLP compared with their definitions."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from cairn.layers.embedding import Embedding
from cairn.layers.linear import Head, Linear, TiedHead
from cairn.layers.mlp import GatedMLP
from cairn.layers.norm import RMSNorm
from cairn.layers.residual import Hidden, Product, Residual
from cairn.layers.schemes.base import Rows
from cairn.ops import planning
from cairn.ops.linear import skinny_gemm_panel
from cairn.specs.ffn import DenseFfn


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(dtype, bias):
    torch.manual_seed(0)
    layer = Linear(48, [Rows("w", 33)], bias, dtype=dtype)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape))
    weight = layer.weight.clone()
    x = torch.randn(5, 48).to(dtype)
    expected = functional.linear(x.double(), weight.double()) + (
        layer.bias.double() if bias else 0.0
    )
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(layer(x).double(), expected, rtol=0, atol=tolerance)
    assert layer(x).dtype == dtype and layer(x).shape == (5, 33)
    torch.testing.assert_close(layer(x[:1]).double(), expected[:1], rtol=0, atol=tolerance)


@pytest.mark.parametrize("bias", [False, True])
def test_linear_with_what_stands_before_and_behind(bias):
    torch.manual_seed(1)
    layer, norm = (
        Linear(48, [Rows("w", 32)], bias, dtype=torch.float32),
        RMSNorm(48, 1e-3, dtype=torch.float32),
    )
    for parameter in (*layer.parameters(), *norm.parameters()):
        parameter.copy_(torch.randn(parameter.shape))
    x = torch.randn(5, 48)
    product = functional.linear(norm(x), layer.weight.clone(), layer.bias)
    plain = functional.linear(x, layer.weight.clone(), layer.bias)
    torch.testing.assert_close(layer(x, norm), product)
    residual = torch.ones(5, 32)
    layer.add_to(residual, x)
    torch.testing.assert_close(residual, plain + 1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "tokens, at_once",
    [
        (skinny_gemm_panel.FEWEST - 1, False),
        (skinny_gemm_panel.FEWEST, True),
        (skinny_gemm_panel.MOST, True),
        (skinny_gemm_panel.MOST + 1, False),
    ],
)
def test_the_norm_is_fused_with_the_addition_where_that_saves_a_pass(bias, tokens, at_once):
    torch.manual_seed(2)
    layer, norm = (
        Linear(48, [Rows("w", 32)], bias, dtype=torch.float32),
        RMSNorm(32, 1e-3, dtype=torch.float32),
    )
    for parameter in (*layer.parameters(), *norm.parameters()):
        parameter.copy_(torch.randn(parameter.shape))
    x = torch.randn(tokens, 48)
    wanted = functional.linear(x, layer.weight.clone(), layer.bias) + 1
    residual = torch.ones(tokens, 32)
    normed = layer.add_to(residual, x, norm)
    torch.testing.assert_close(residual, wanted)
    assert (normed is not None) == at_once
    if at_once:
        torch.testing.assert_close(normed, norm(wanted))
    assert layer.add_to(residual, x) is None
    torch.testing.assert_close(residual, 2 * wanted - 1)


def test_tied_head_shares_the_table_and_stops_at_the_vocabulary():
    table = Embedding(11, 16, dtype=torch.float32)
    assert table.padding == 53
    table.weight.copy_(torch.randn(64, 16))
    head = TiedHead(table, 10)
    assert not list(head.parameters())
    x, norm = torch.randn(3, 16), RMSNorm(16, 1e-3, dtype=torch.float32)
    norm.weight.copy_(torch.randn(16))
    torch.testing.assert_close(head.logits(x, norm), norm(x) @ table.weight[:10].T)
    assert torch.equal(table(torch.tensor([10, 0])), table.weight[[10, 0]])


def test_a_head_of_its_own_stops_at_the_vocabulary():
    head = Head(70, 16, dtype=torch.float32)
    assert head.padding == 58
    head.weight.copy_(torch.randn(128, 16))
    x, norm = torch.randn(3, 16), RMSNorm(16, 1e-3, dtype=torch.float32)
    norm.weight.copy_(torch.randn(16))
    torch.testing.assert_close(head.logits(x, norm), norm(x) @ head.weight[:70].T)


def test_norm():
    norm = RMSNorm(8, 1e-2, dtype=torch.float32)
    norm.weight.copy_(torch.randn(8))
    x = torch.randn(5, 3, 8)

    def expected(value):
        return norm.weight * value / (value.square().mean(-1, keepdim=True) + 1e-2).sqrt()

    torch.testing.assert_close(norm(x), expected(x))
    strided = torch.randn(5, 3, 12)[..., :8]
    torch.testing.assert_close(norm(strided), expected(strided))


def test_mlp():
    mlp = GatedMLP(8, DenseFfn(6), dtype=torch.float32)
    for parameter in mlp.parameters():
        parameter.copy_(torch.randn(parameter.shape))
    gate, up = mlp.gate_up.weight[:6].clone(), mlp.gate_up.weight[6:].clone()
    x = torch.randn(4, 8)
    expected = functional.silu(x @ gate.T) * (x @ up.T)
    norm = RMSNorm(8, 1e-3, dtype=torch.float32)
    norm.weight.copy_(torch.randn(8))

    def delta(h):
        product = mlp(h)
        assert product.linear is mlp.down
        return product.value()

    down = mlp.down.weight.clone()
    torch.testing.assert_close(delta(Hidden(x)), expected @ down.T)
    torch.testing.assert_close(delta(Hidden(x[:1])), expected[:1] @ down.T)
    torch.testing.assert_close(delta(Hidden(x, norm)), delta(Hidden(norm(x))))


@pytest.mark.parametrize("at_once", [False, True])
def test_the_residual_is_summed_and_normed_in_one_place(monkeypatch, at_once):
    """Deltas as tensors and as products, norms of the next reader and of the delta itself; with one
    op that adds and normalizes, as on a GPU, and without it."""
    monkeypatch.setattr(planning, "fuses_add_norm", lambda x: at_once)
    norm = RMSNorm(8, 1e-3, dtype=torch.float32)
    linear = Linear(6, [Rows("w", 8)], dtype=torch.float32)
    for parameter in (*norm.parameters(), *linear.parameters()):
        parameter.copy_(torch.randn(parameter.shape))
    for tokens in (1, 40, 2000):
        x, delta, inner = torch.randn(tokens, 8), torch.randn(tokens, 8), torch.randn(tokens, 6)
        residual = Residual(x.clone())
        assert residual.read(None).value() is residual.x
        residual.add(delta)
        residual.add(Product(linear, inner), next_norm=norm)
        twice = Residual(x + inner @ linear.weight.T)
        twice.add(delta.clone(), next_norm=norm)
        assert (twice.read(norm).norm is None) == at_once
        torch.testing.assert_close(twice.read(norm).value(), residual.read(norm).value())
        torch.testing.assert_close(twice.x, residual.x)
        total = x + delta + inner @ linear.weight.T
        torch.testing.assert_close(residual.x, total)
        torch.testing.assert_close(residual.read(norm).value(), norm(total))
        torch.testing.assert_close(residual.read(None).value(), total)
        residual.add(Product(linear, inner), own_norm=norm)
        torch.testing.assert_close(residual.x, total + norm(inner @ linear.weight.T))
        torch.testing.assert_close(residual.read(norm).value(), norm(residual.x))
