"""The delta rule over the rows of a step: model sizes on a GPU, sequences cut into steps, and the
equations of related ops."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from cairn import ops
from cairn.ops.mamba.gated_delta_rule_rows import gated_delta_rule_rows
from cairn.ops.mamba.recurrence import CHUNK, FEW

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Net(NamedTuple):
    """Numbers of key and value heads, and their dims."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


NETS = {"cpu": Net(1, 2, 8, 8), "cuda": Net(16, 32, 128, 128)}


class Layer:
    """Random inputs of one sequence, and the state of a few slots, all NaN.

    Args:
        net: sizes.
        tokens: how many.
        device, dtype: of what is given; decays reach e^-60 a token.
    """

    def __init__(self, net: Net, tokens: int, device: str, dtype: torch.dtype) -> None:
        random = torch.Generator().manual_seed(tokens)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random).to(device)

        self.net = net
        self.mixed = drawn(tokens, net.channels).to(dtype)
        self.a, self.b = (drawn(tokens, net.value_heads).to(dtype) for _ in range(2))
        self.a_log = 2 * drawn(net.value_heads)
        self.dt_bias = drawn(net.value_heads)
        self.weight = drawn(net.channels, 4).to(dtype)
        self.states = torch.full(
            (3, net.value_heads, net.value_dim, net.key_dim), torch.nan, device=device
        )
        self.conv = torch.full((3, net.channels, 3), torch.nan, device=device, dtype=dtype)

    def step(self, first: int, end: int, way: str | None = None) -> Tensor:
        """Outputs of tokens first .. end - 1, in slot 1."""

        def words(*numbers: int) -> Tensor:
            return torch.tensor(numbers, dtype=torch.int32, device=self.mixed.device)

        at, count = slice(first, end), end - first
        where = words(0, count), words(1), words(1), words(first) > 0
        y = ops.causal_conv1d_rows(self.mixed[at], self.weight, self.conv, *where, count)
        n = self.net
        keys = n.key_heads * n.key_dim
        q, k, v = y.split((keys, keys, n.value_heads * n.value_dim), dim=1)
        q, k = (x.unflatten(1, (n.key_heads, n.key_dim)) for x in (q, k))
        v = v.unflatten(1, (n.value_heads, n.value_dim))
        run: Any = gated_delta_rule_rows if way is None else gated_delta_rule_rows.using(way)
        gates = self.a_log, self.a[at], self.dt_bias
        return run(*gates, q, k, v, self.b[at], self.states, *where, words(first), count)

    def run(self, ends: list[int]) -> Tensor:
        return torch.cat([self.step(a, b) for a, b in itertools.pairwise([0, *ends])])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [CHUNK + FEW, CHUNK + FEW + 1, 3 * CHUNK, 3 * CHUNK + 2])
@pytest.mark.parametrize("device", DEVICES)
def test_cuts_at_borders_of_chunks_change_no_bit(
    device: str, length: int, dtype: torch.dtype
) -> None:
    whole, parts = (Layer(NETS[device], length, device, dtype) for _ in range(2))
    ends = [*range(CHUNK, length, CHUNK), length]
    assert torch.equal(whole.run([length]), parts.run(ends))
    assert torch.equal(whole.states[1], parts.states[1])
    assert torch.equal(whole.conv[1], parts.conv[1])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lengths", [(3 * CHUNK + 20,), (40, 3 * CHUNK, 2 * CHUNK + 9) * 20])
def test_chunks_on_a_gpu_give_what_tokens_give(
    lengths: tuple[int, ...], dtype: torch.dtype
) -> None:
    layer = Layer(NETS["cuda"], sum(lengths), "cuda", dtype)
    n, count = layer.net, len(lengths)
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
    slots = torch.arange(count, dtype=torch.int32, device="cuda")
    keys = n.key_heads * n.key_dim
    q, k, v = layer.mixed.split((keys, keys, n.value_heads * n.value_dim), dim=1)
    q, k = (x.unflatten(1, (n.key_heads, n.key_dim)) for x in (q, k))
    v = v.unflatten(1, (n.value_heads, n.value_dim))
    gates, where = (layer.a_log, layer.a, layer.dt_bias), (starts, slots, slots, slots < 0)
    found = []
    for longest in (max(lengths), FEW):  # the second runs token by token
        states = torch.full((count, n.value_heads, n.value_dim, n.key_dim), torch.nan).cuda()
        rest = (q, k, v, layer.b, states, *where, 5 * slots, longest)
        found.append((ops.gated_delta_rule_rows(*gates, *rest).float(), states))
    for got, wanted in zip(*found, strict=True):
        assert float((got - wanted).norm() / wanted.norm()) < 0.02


@pytest.mark.parametrize("device", DEVICES)
def test_chunks_give_what_tokens_give(device: str) -> None:
    """In float32, for a whole sequence and for a step that begins within a chunk."""
    length = 3 * CHUNK + 20
    chunks, tokens = (Layer(NETS[device], length, device, torch.float32) for _ in range(2))
    got = chunks.run([CHUNK // 2, length])
    wanted = torch.cat([tokens.step(n, n + 1, "reference") for n in range(length)])
    assert float((got - wanted).abs().max() / wanted.abs().max()) < 1e-5
    off = (chunks.states[1] - tokens.states[1]).abs().max() / tokens.states[1].abs().max()
    assert float(off) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1, FEW, 5 * CHUNK + 7])
def test_half_precision_at_full_size(length: int) -> None:
    """Errors are relative to each head's outputs; rounding of the inputs alone causes 0.4%."""
    half = Layer(NETS["cuda"], length, "cuda", torch.bfloat16)
    full = Layer(NETS["cuda"], length, "cuda", torch.bfloat16)
    got, wanted = half.step(0, length).float(), full.step(0, length, "reference").float()
    rate = (got - wanted).square().mean((0, 2)) / wanted.square().mean((0, 2))
    assert float(rate.sqrt().max()) < 0.01


@pytest.mark.parametrize("device", DEVICES)
def test_rows_side_by_side_give_what_each_gives_alone(device: str) -> None:
    """Bitwise equal on a GPU, whose programs process one row; padding gives 0."""
    net, lengths = NETS[device], (1, 17, 64, 200, 3)
    total, dtype = sum(lengths), torch.float32
    layer = Layer(net, total + 5, device, dtype)
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    slots = torch.arange(len(lengths), dtype=torch.int32, device=device)
    first = torch.tensor([70, 0, 0, 60, 63], dtype=torch.int32, device=device)
    shape = (len(lengths), net.value_heads, net.value_dim, net.key_dim)
    before = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device)
    n, keys = net, net.key_heads * net.key_dim

    def run(at: slice, states: Tensor, where: tuple[Tensor, ...], longest: int) -> Tensor:
        q, k, v = layer.mixed[at].split((keys, keys, n.value_heads * n.value_dim), dim=1)
        q, k = (x.unflatten(1, (n.key_heads, n.key_dim)) for x in (q, k))
        v = v.unflatten(1, (n.value_heads, n.value_dim))
        gates = layer.a_log, layer.a[at], layer.dt_bias
        return ops.gated_delta_rule_rows(*gates, q, k, v, layer.b[at], states, *where, longest)

    together = before.clone()
    got = run(slice(None), together, (starts, slots, slots, first > 0, first), max(lengths))
    assert not got[total:].any()
    for i, (begin, end) in enumerate(itertools.pairwise(starts.tolist())):
        own, alone = slice(i, i + 1), before.clone()
        zero = starts.new_tensor([0, end - begin])
        where = (zero, slots[own], slots[own], first[own] > 0, first[own])
        wanted = run(slice(begin, end), alone, where, end - begin)
        if device == "cuda":
            assert torch.equal(got[begin:end], wanted) and torch.equal(together[i], alone[i])
        else:
            assert torch.allclose(got[begin:end], wanted, atol=1e-5)


def _fla() -> Any:
    return pytest.importorskip("fla.ops.gated_delta_rule", reason="fla is not installed")


@pytest.mark.gpu
@pytest.mark.parametrize("length", [64, 1000])
def test_against_fla(length: int) -> None:
    fla, n = _fla(), NETS["cuda"]
    layer = Layer(n, length, "cuda", torch.bfloat16)
    keys = n.key_heads * n.key_dim
    q, k, v = layer.mixed.split((keys, keys, n.value_heads * n.value_dim), dim=1)
    q, k = (x.unflatten(1, (n.key_heads, n.key_dim))[None] for x in (q, k))
    v = v.unflatten(1, (n.value_heads, n.value_dim))[None]
    g, beta = ops.fused_gdn_gating(layer.a_log, layer.a, layer.b.float(), layer.dt_bias)
    got, _, _ = ops.chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
    each = n.value_heads // n.key_heads
    q, k = (x.repeat_interleave(each, dim=2) for x in (q, k))
    wanted, _ = fla.chunk_gated_delta_rule(
        q, k, v, g, beta.to(q.dtype), use_qk_l2norm_in_kernel=True
    )
    assert float((got - wanted).float().norm() / wanted.float().norm()) < 0.02
