"""Gated delta nets: the layer compared with its formulas, and rows in a batch with rows alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from cairn import ops
from cairn.attention.batch import Batch, StepRows
from cairn.attention.cuts import WHOLE, decode_cuts
from cairn.attention.registry import Backends, cache_schema
from cairn.cache.pools import CachePools, PoolSizes
from cairn.cache.schema import PageFormat
from cairn.layers.gated_delta import GatedDeltaNet
from cairn.layers.residual import Hidden, Product
from cairn.layers.rotary import Angles
from cairn.layers.weight import Source
from cairn.ops.mamba.gated_delta_rule_rows import cut
from cairn.specs.gated_delta import GatedDeltaSpec

HIDDEN = 24
SPEC = GatedDeltaSpec(key_heads=2, value_heads=6, key_dim=8, value_dim=5, conv_kernel=4, eps=1e-3)
SHAPES = {
    "three values a key": SPEC,
    "one value a key": replace(SPEC, value_heads=2, value_dim=12),
    "short convolution": replace(SPEC, key_heads=1, value_heads=4, conv_kernel=2),
    "no convolution": replace(SPEC, conv_kernel=1),
    "by key head": replace(SPEC, grouped=True),
}


def net_of(spec: GatedDeltaSpec, seed: int = 0) -> tuple[GatedDeltaNet, dict[str, Tensor]]:
    """A layer and the checkpoint from which it was loaded."""
    net, stored = GatedDeltaNet(spec, HIDDEN, torch.float32), {}
    generator = torch.Generator().manual_seed(seed)
    for weight in net.weights(Source()):
        tensor = torch.randn(weight.shape, generator=generator)
        if len(weight.shape) == 2:
            tensor *= HIDDEN**-0.5
        stored[weight.source] = tensor
        read = tensor if weight.transform is None else weight.transform(tensor)
        weight.place.copy_(read)
    return net, stored


def by_formula(spec: GatedDeltaSpec, stored: dict[str, Tensor], x: Tensor) -> Tensor:
    """The layer on a whole sequence [T, hidden], token by token, in float64."""
    w = {name: tensor.double() for name, tensor in stored.items()}
    hk, hv, dk, dv = spec.key_heads, spec.value_heads, spec.key_dim, spec.value_dim
    r, x = hv // hk, x.double()
    if spec.grouped:
        qkvz = (x @ w["in_proj_qkvz.weight"].T).unflatten(-1, (hk, -1))
        q, k, v, z = (part.flatten(1) for part in qkvz.split((dk, dk, r * dv, r * dv), -1))
        b, a = (
            p.flatten(1)
            for p in (x @ w["in_proj_ba.weight"].T).unflatten(-1, (hk, -1)).split(r, -1)
        )
        u = torch.cat((q, k, v), -1)
    else:
        u, z, b, a = (x @ w[f"in_proj_{name}.weight"].T for name in ("qkv", "z", "b", "a"))
    taps = spec.conv_kernel
    padded = torch.cat((u.new_zeros(taps - 1, u.shape[1]), u))
    y = sum(padded[i : i + len(x)] * w["conv1d.weight"][:, 0, i] for i in range(taps))
    q, k, v = functional.silu(y).split((hk * dk, hk * dk, hv * dv), -1)
    q, k = (t.unflatten(-1, (hk, dk)).repeat_interleave(r, 1) for t in (q, k))
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    v, q = v.unflatten(-1, (hv, dv)), q / dk**0.5
    g = -w["A_log"].exp() * functional.softplus(a + w["dt_bias"])
    state, out = x.new_zeros(hv, dk, dv), []
    for t in range(len(x)):
        state = state * g[t].exp()[:, None, None]
        read = (state * k[t][:, :, None]).sum(1)
        change = b[t].sigmoid()[:, None] * (v[t] - read)
        state = state + k[t][:, :, None] * change[:, None, :]
        out.append((state * q[t][:, :, None]).sum(1))
    o = torch.stack(out)
    o = o / (o.square().mean(-1, keepdim=True) + spec.eps).sqrt() * w["norm.weight"]
    o = o * functional.silu(z.unflatten(-1, (hv, dv)))
    return (o.flatten(1) @ w["out_proj.weight"].T).float()


class Rows:
    """The states of a few rows, initially NaN, and steps on them.

    Args:
        net: the layer.
        spec: its spec.
    """

    def __init__(self, net: GatedDeltaNet, spec: GatedDeltaSpec, rows: int = 4) -> None:
        form = PageFormat(64, torch.float32)
        schema = cache_schema([spec], form)
        self.pools = CachePools(schema, PoolSizes((1,), rows), "cpu")
        for state in self.pools.states():
            state.fill_(torch.nan)
        self.net, self.backends = net, Backends([spec], self.pools)

    def step(self, parts: Sequence[tuple[int, int, Tensor]], decoding: int = 0) -> list[Tensor]:
        """Run (row, first slot, inputs [n, hidden]) in one step; returns the outputs of each."""
        count = np.array([len(x) for _, _, x in parts])
        first = np.array([at for _, at, _ in parts])
        row = np.array([number for number, _, _ in parts])
        slot = np.concatenate([at + np.arange(n) for at, n in zip(first, count, strict=True)])
        rows = StepRows(row, first, count, slot, decoding)
        none = torch.zeros(0, dtype=torch.int64)
        slots = torch.from_numpy(slot)
        batch = Batch(none, slots, torch.from_numpy(row.repeat(count)), slots, (), none, none, 0)
        step = self.backends.step(batch, rows=rows)
        x = torch.cat([x for _, _, x in parts])
        with torch.inference_mode():
            delta = self.net(Hidden(x), step.layers[0], Angles(slots, x.dtype))
            assert isinstance(delta, Product)
            return list(delta.value().split(count.tolist()))

    def run(self, row: int, x: Tensor, ends: Sequence[int]) -> Tensor:
        """A sequence in steps that end at `ends`."""
        begins = [0, *ends[:-1]]
        return torch.cat(
            [self.step([(row, a, x[a:b])])[0] for a, b in zip(begins, ends, strict=True)]
        )


def inputs(length: int, seed: int = 1) -> Tensor:
    return torch.randn(length, HIDDEN, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("length", [1, 2, 17, 64, 150])
def test_the_layer_is_its_formula(shape: str, length: int) -> None:
    spec = SHAPES[shape]
    net, stored = net_of(spec)
    wanted, x = by_formula(spec, stored, inputs(length)), inputs(length)
    for ends in ([length], list(range(1, length + 1)), [(length + 1) // 2, length]):
        got = Rows(net, spec).run(2, x, sorted(set(ends)))
        assert torch.allclose(got, wanted, atol=2e-5 * float(wanted.abs().max()) + 1e-6)


def test_rows_by_key_head_are_put_in_order() -> None:
    spec = SHAPES["by key head"]
    net, stored = net_of(spec)
    x = inputs(5)
    qkvz, ba = (x @ stored[f"in_proj_{name}.weight"].T for name in ("qkvz", "ba"))
    sizes = spec.key_heads, spec.value_heads, spec.key_dim, spec.value_dim
    qkv, z, b, a = ops.fused_qkvzba_split_reshape_cat(qkvz, ba, *sizes)
    wanted = torch.cat([part.reshape(5, -1) for part in (qkv, z, b, a)], -1)
    assert torch.allclose(net.inputs(x), wanted, atol=1e-5)


def test_rows_do_not_see_each_other() -> None:
    """Rows that begin, continue and decode in a batch give the results of each row alone."""
    net, _ = net_of(SPEC)
    x = {row: inputs(200, row) for row in range(4)}
    alone = {row: Rows(net, SPEC).run(0, x[row], [60, 61, 200]) for row in x}
    rows = Rows(net, SPEC)
    rows.step([(0, 0, x[0][:60]), (3, 0, x[3][:60])])
    (zero, three, one) = rows.step(
        [(0, 60, x[0][60:61]), (3, 60, x[3][60:61]), (1, 0, x[1][:130])], decoding=2
    )
    last = rows.step([(3, 61, x[3][61:90]), (0, 61, x[0][61:]), (2, 0, x[2][:2])])
    for got, wanted in (
        (zero, alone[0][60:61]), (three, alone[3][60:61]), (one, alone[1][:130]),
        (last[0], alone[3][61:90]), (last[1], alone[0][61:]), (last[2], alone[2][:2]),
    ):  # fmt: skip
        assert torch.allclose(got, wanted, atol=2e-5)


@pytest.mark.parametrize("length", [64, 70, 129, 144, 150, 192])
def test_cuts_at_chunks_change_no_bit(length: int) -> None:
    """Holds for the rule itself: projections of other numbers of tokens may round differently."""
    spec = replace(SPEC, key_dim=16)
    generator = torch.Generator().manual_seed(length)
    whole, parts = Rows(net_of(spec)[0], spec), Rows(net_of(spec)[0], spec)
    projected = torch.randn(length, sum(whole.net.widths), generator=generator)
    for rows in (whole, parts):
        rows.net.inputs.forward = lambda x, norm=None: x.clone()
        rows.net.out = None
    ends = [*range(64, length, 64), length]
    got = [rows_run(parts, projected, a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    assert torch.equal(torch.cat(got), rows_run(whole, projected, 0, length))
    for one, other in zip(whole.pools.states(), parts.pools.states(), strict=True):
        assert torch.equal(one[1], other[1])


def rows_run(rows: Rows, projected: Tensor, first: int, end: int) -> Tensor:
    """The input of the output projection."""
    x = projected[first:end]
    slots = torch.arange(first, end)
    host = StepRows(np.array([1]), np.array([first]), np.array([end - first]), slots.numpy(), 0)
    none = torch.zeros(0, dtype=torch.int64)
    batch = Batch(none, slots, torch.ones_like(slots), slots, (), none, none, end)
    step = rows.backends.step(batch, rows=host)
    with torch.inference_mode():
        return rows.net(Hidden(x), step.layers[0], Angles(slots, x.dtype)).x


def test_cutting_rows() -> None:
    def parts(first: int, count: int) -> list[tuple[int, int]]:
        found = cut(range(100, 100 + count), first)
        assert sum(len(part) for part in found) == count and found[0].start == 100
        return [(part.start - 100 + first, len(part)) for part in found]

    assert parts(0, 1) == [(0, 1)]
    assert parts(63, 1) == [(63, 1)]
    assert parts(64, 1) == [(64, 1)]
    assert parts(0, 128) == [(0, 128)]
    assert parts(60, 4) == [(60, 4)]
    assert parts(60, 200) == [(60, 4), (64, 192), (256, 4)]
    assert parts(70, 3) == [(70, 3)]


@pytest.mark.parametrize("decoding", [True, False])
def test_a_step_whose_rows_the_host_does_not_know(decoding: bool) -> None:
    """As in a graph: padding belongs to no row, and the rest is the same as with rows known on the
    host."""
    net, _ = net_of(SPEC)
    lengths = {2: 1, 0: 1, 3: 1} if decoding else {2: 1, 0: 70, 3: 5}
    before, total = 40, sum(lengths.values())
    known, unknown = Rows(net, SPEC), Rows(net, SPEC)
    for rows in (known, unknown):
        rows.step([(number, 0, inputs(before, number)) for number in (2, 0)])
    parts = [
        (number, before if number in (2, 0) else 0, inputs(count, 7 + number))
        for number, count in lengths.items()
    ]
    wanted = torch.cat(known.step(parts))
    row = [number for number, _, x in parts for _ in x]
    slot = [first + i for _, first, x in parts for i in range(len(x))]
    padded = torch.tensor([*slot, -1, -1]), torch.tensor([*row, 4 if decoding else 0, 0])
    none = torch.zeros(0, dtype=torch.int64)
    batch = Batch(none, padded[0], padded[1], padded[0], (), none, none, 0)
    cuts = decode_cuts(total + 2) if decoding else WHOLE
    step = unknown.backends.step(batch, cuts)
    x = torch.cat([*(x for _, _, x in parts), inputs(2, 99)])
    with torch.inference_mode():
        delta = net(Hidden(x), step.layers[0], Angles(padded[0], x.dtype))
    assert isinstance(delta, Product)
    got = delta.value()
    assert torch.allclose(got[:total], wanted, atol=1e-5) and not got[total:].isnan().any()
    for one, other in zip(known.pools.states(), unknown.pools.states(), strict=True):
        assert torch.allclose(one, other, atol=1e-5, equal_nan=True)
