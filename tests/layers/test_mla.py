"""Latent attention in absorbed form, compared with explicit keys and values per head."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from cairn.attention.inputs import MlaInputs
from cairn.layers.mla import MlaAttention
from cairn.layers.residual import Hidden
from cairn.layers.rotary import Angles, Rotary
from cairn.specs.mla import IndexerSpec, MlaSpec
from cairn.specs.rotary import RotarySpec

HIDDEN, TOKENS = 24, 9


class AllTokens:
    """A layer whose queries see all previous tokens; records its inputs."""

    def __init__(self, spec: MlaSpec) -> None:
        self.spec = spec

    def run(self, inputs: MlaInputs) -> torch.Tensor:
        self.inputs = inputs
        assert inputs.absorb is not None
        inputs.absorb()
        keys = torch.cat((inputs.latent, inputs.k_pe), dim=-1)
        scores = torch.einsum("thd,sd->hts", inputs.q, keys) * self.spec.scale
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        p = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hts,sr->thr", p, inputs.latent)


def spec_of(bias: bool, interleaved: bool, index_interleaved: bool) -> MlaSpec:
    rotary = functools.partial(RotarySpec, "standard", 4, 100.0)
    return MlaSpec(
        num_heads=3,
        q_lora_rank=10,
        kv_lora_rank=8,
        nope_dim=6,
        rope_dim=4,
        value_dim=5,
        rotary=rotary(interleaved=interleaved),
        scale=0.3,
        bias=bias,
        topk=2,
        indexer=IndexerSpec(2, 7, rotary(interleaved=index_interleaved)),
    )


def built(spec: MlaSpec) -> MlaAttention:
    torch.manual_seed(3)
    rotaries = Rotary(spec.rotary), Rotary(spec.indexer.rotary)
    module = MlaAttention(spec, HIDDEN, *rotaries, torch.float32)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape))
    return module


def rotated(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """The first 4 values of x [T, ..., n] rotated, token t by the angle t * 100^(-c / 2)."""
    angle = torch.arange(len(x))[:, None] * torch.tensor([1.0, 0.1])
    cos, sin = (f(angle).view(len(x), *(x.dim() - 2) * [1], 2) for f in (torch.cos, torch.sin))
    at = ([0, 2], [1, 3]) if interleaved else ([0, 1], [2, 3])
    a, b = x[..., at[0]], x[..., at[1]]
    y = x.clone()
    y[..., at[0]], y[..., at[1]] = a * cos - b * sin, b * cos + a * sin
    return y


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, x.shape[-1:], weight, 1e-6)


def expanded(module: MlaAttention, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The output [T, hidden] with keys and values of every head, and the latent of queries."""
    spec, heads = module.spec, module.spec.num_heads
    down = functional.linear(x, module.down.weight.clone(), module.down.bias)
    down = down[:, module.index_dim :]
    q_latent = normed(down[:, :10], module.q_norm.weight)
    latent = normed(down[:, 10:18], module.kv_norm.weight)
    k_pe = rotated(down[:, 18:], spec.rotary.interleaved)
    q = (q_latent @ module.q_up.weight[: heads * 10].T).view(len(x), heads, 10)
    q = torch.cat((q[..., :6], rotated(q[..., 6:], spec.rotary.interleaved)), dim=-1)
    kv = (latent @ module.kv_up.weight.T).view(len(x), heads, 11)
    k = torch.cat((kv[..., :6], k_pe.unsqueeze(1).expand(-1, heads, -1)), dim=-1)
    by_head = (part.transpose(0, 1) for part in (q, k, kv[..., 6:]))
    o = functional.scaled_dot_product_attention(*by_head, is_causal=True, scale=spec.scale)
    flat = o.transpose(0, 1).flatten(1)
    return functional.linear(flat, module.out.weight.clone(), module.out.bias), q_latent


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_absorbed_form(bias, interleaved):
    module = built(spec_of(bias, interleaved, True))
    assert (module.down.bias is not None, module.out.bias is not None) == (bias, bias)
    assert module.q_up.bias is None and module.kv_up.bias is None
    x = torch.randn(TOKENS, HIDDEN)
    angles = Angles(torch.arange(TOKENS), torch.float32)
    delta = module(Hidden(x), AllTokens(module.spec), angles)
    torch.testing.assert_close(delta.value(), expanded(module, x)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("interleaved", [False, True])
def test_indexer(interleaved):
    module = built(spec_of(False, True, interleaved))
    x, layer = torch.randn(TOKENS, HIDDEN), AllTokens(module.spec)
    module(Hidden(x), layer, Angles(torch.arange(TOKENS), torch.float32))
    index, own = layer.inputs.index, module.indexer
    q = (expanded(module, x)[1] @ module.q_up.weight[-2 * 7 :].T).view(TOKENS, 2, 7)
    k = x @ module.down.weight[: module.index_dim].T
    k = functional.layer_norm(k, (7,), own.k_norm.weight, own.k_norm.bias, 1e-6)
    near = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
    near(index.q, rotated(q, interleaved))
    near(index.k, rotated(k, interleaved))
    near(index.weights, x @ own.head_weights.T * 2**-0.5 * 7**-0.5)


def test_queries_are_one_tensor_that_nothing_concatenates():
    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert func is not torch.ops.aten.cat.default
            return func(*args, **(kwargs or {}))

    module = built(spec_of(False, True, True))
    x, layer = torch.randn(TOKENS, HIDDEN), AllTokens(module.spec)
    layer.run = lambda inputs: setattr(layer, "inputs", inputs) or inputs.q[..., :8].contiguous()
    with Calls():
        module(Hidden(x), layer, Angles(torch.arange(TOKENS), torch.float32))
    assert layer.inputs.q.shape == (TOKENS, 3, 8 + 4) and layer.inputs.q.is_contiguous()


def test_head_weights_of_bfloat16_are_summed_in_float32():
    spec = spec_of(False, True, True)
    rotaries = Rotary(spec.rotary), Rotary(spec.indexer.rotary)
    module = MlaAttention(spec, HIDDEN, *rotaries, torch.bfloat16)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape))
    x = torch.randn(TOKENS, HIDDEN).bfloat16()
    weights = module.indexer.of_heads(x)
    expected = x.float() @ module.indexer.head_weights.float().T
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-5)
