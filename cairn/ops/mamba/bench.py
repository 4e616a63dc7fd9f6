"""Benchmark points of this family's ops, for `cairn bench ops`."""

from __future__ import annotations

import torch

from cairn.ops.bench_points import Draw, Point, Points, moved
from cairn.ops.mamba.cases import mixed_inputs
from cairn.ops.mamba.causal_conv1d_cpu import causal_conv1d_fn_cpu, causal_conv1d_update_cpu
from cairn.ops.mamba.causal_conv1d_fwd import causal_conv1d_fwd
from cairn.ops.mamba.causal_conv1d_rows import causal_conv1d_rows
from cairn.ops.mamba.causal_conv1d_update import causal_conv1d_update
from cairn.ops.mamba.chunk_gated_delta_rule import gated_delta_rule
from cairn.ops.mamba.fused_gdn_gating import fused_gdn_gating
from cairn.ops.mamba.fused_qkvzba_split_reshape_cat import (
    fused_qkvzba_split_reshape_cat,
    fused_qkvzba_split_reshape_cat_contiguous,
)
from cairn.ops.mamba.fused_sigmoid_gating_delta_rule_update import (
    fused_sigmoid_gating_delta_rule_update,
)
from cairn.ops.mamba.gated_delta_rule_rows import gated_delta_rule_rows
from cairn.ops.mamba.ragged_rows import ragged_rows
from cairn.ops.mamba.sizes import Net, net_of


@causal_conv1d_fn_cpu.bench
def _(draw: Draw) -> Points:
    net = net_of(draw)
    for tokens in net.prefills:
        x, weight = draw.randn(net.channels, tokens), draw.randn(net.channels, net.width)
        starts = draw.tensor([0, tokens], torch.int32)
        given = draw.args(x, weight, None, "silu", None, None, None, starts, None)
        yield Point(f"{tokens} x {net.channels}", given, moved(x, x, weight))


@causal_conv1d_update_cpu.bench
def _(draw: Draw) -> Points:
    net = net_of(draw)
    for batch in net.batches:
        x, weight = draw.randn(batch, net.channels), draw.randn(net.channels, net.width)
        states = draw.randn(batch, net.channels, net.width - 1)
        given = draw.args(x, states, weight, None, "silu", None)
        size = f"{batch} x {net.channels}"
        yield Point(size, given, moved(x, x, weight, states, states))


@causal_conv1d_fwd.bench
def _(draw: Draw) -> Points:
    net = net_of(draw)
    for tokens in net.prefills:
        x, weight = draw.randn(net.channels, tokens), draw.randn(net.channels, net.width)
        states = draw.randn(2, net.channels, net.width - 1)
        starts, slot = draw.tensor([0, tokens], torch.int32), draw.tensor([1], torch.int32)
        used = draw.tensor([True], torch.bool)
        yield Point(
            f"{tokens} x {net.channels}",
            draw.args(x, weight, None, states, starts, slot, used, True, -1),
            moved(x, x, weight),
        )


@causal_conv1d_update.bench
def _(draw: Draw) -> Points:
    net = net_of(draw)
    for batch in net.batches:
        x, weight = draw.randn(batch, net.channels, 1), draw.randn(net.channels, net.width)
        states = draw.randn(batch + 1, net.channels, net.width - 1)
        slot = draw.arange(batch, torch.int32) + 1
        yield Point(
            f"{batch} x {net.channels}",
            draw.args(x, states, weight, None, True, None, slot, -1),
            moved(x, x, weight, states[1:], states[1:]),
        )


@gated_delta_rule.bench
def _(draw: Draw) -> Points:
    net = net_of(draw)
    for tokens in net.prefills:
        q, k = (draw.randn(1, tokens, net.key_heads, net.key_dim) for _ in range(2))
        v = draw.randn(1, tokens, net.value_heads, net.value_dim)
        g, beta = (draw.rand(1, tokens, net.value_heads) for _ in range(2))
        state = draw.randn(1, net.value_heads, net.value_dim, net.key_dim, dtype=torch.float32)
        starts = draw.tensor([0, tokens], torch.int32)
        flops = net.value_heads * (10 * 64 * net.key_dim + 6 * net.key_dim * net.value_dim)
        yield Point(
            f"{tokens} x {net.value_heads} x {net.value_dim}",
            draw.args(q, k, v, -g, beta, state, None, None, starts, True),
            moved(q, k, v, v, state, state),
            float(tokens * flops),
        )


@fused_gdn_gating.bench
def _(draw: Draw) -> Points:
    net = net_of(draw)
    for tokens in net.prefills:
        a, b = (draw.randn(tokens, net.value_heads) for _ in range(2))
        rate, bias = (draw.randn(net.value_heads) for _ in range(2))
        size = f"{tokens} x {net.value_heads}"
        yield Point(size, draw.args(rate, a, b, bias), moved(a, a, b, b))


@fused_sigmoid_gating_delta_rule_update.bench
def _(draw: Draw) -> Points:
    net = net_of(draw)
    for batch in net.batches:
        q, k = (draw.randn(1, batch, net.key_heads, net.key_dim) for _ in range(2))
        v = draw.randn(1, batch, net.value_heads, net.value_dim)
        a, b = (draw.randn(batch, net.value_heads) for _ in range(2))
        rate, bias = (draw.randn(net.value_heads) for _ in range(2))
        shape = (batch + 1, net.value_heads, net.value_dim, net.key_dim)
        pool, starts = draw.randn(*shape, dtype=torch.float32), draw.arange(batch + 1, torch.int32)
        slot = draw.arange(batch, torch.int32) + 1
        yield Point(
            f"{batch} x {net.value_heads} x {net.value_dim}",
            draw.args(rate, a, bias, 1.0, 20.0, q, k, v, b, pool, slot, None, True, starts),
            moved(q, k, v, v, pool[1:], pool[1:]),
        )


@causal_conv1d_rows.bench
def _(draw: Draw) -> Points:
    net = net_of(draw)
    for rows, tokens in _steps(net):
        x, weight = draw.randn(rows * tokens, net.channels), draw.randn(net.channels, net.width)
        states = draw.randn(rows, net.channels, net.width - 1)
        starts, slot = draw.arange(rows + 1, torch.int32) * tokens, draw.arange(rows, torch.int32)
        has_initial_state = draw.tensor([True] * rows, torch.bool)
        yield Point(
            f"{rows} x {tokens} x {net.channels}",
            draw.args(x, weight, states, starts, slot, slot, has_initial_state, tokens),
            moved(x, x, weight, states, states),
        )


@gated_delta_rule_rows.bench
def _(draw: Draw) -> Points:
    net = net_of(draw)
    for rows, each in _steps(net):
        tokens = rows * each
        q, k = (draw.randn(tokens, net.key_heads, net.key_dim) for _ in range(2))
        v = draw.randn(tokens, net.value_heads, net.value_dim)
        a, b = (draw.randn(tokens, net.value_heads) for _ in range(2))
        rate, bias = (draw.randn(net.value_heads) for _ in range(2))
        shape = (rows, net.value_heads, net.value_dim, net.key_dim)
        pool, slot = draw.randn(*shape, dtype=torch.float32), draw.arange(rows, torch.int32)
        starts, has_initial_state = slot.new_tensor(range(rows + 1)) * each, slot >= 0
        flops = net.value_heads * (10 * 64 * net.key_dim + 6 * net.key_dim * net.value_dim)
        yield Point(
            f"{rows} x {each} x {net.value_heads} x {net.value_dim}",
            draw.args(
                rate,
                a,
                bias,
                q,
                k,
                v,
                b,
                pool,
                starts,
                slot,
                slot,
                has_initial_state,
                slot * 64,
                each,
            ),
            moved(q, k, v, v, pool, pool),
            float(tokens * flops),
        )


@ragged_rows.bench
def _(draw: Draw) -> Points:
    for tokens in net_of(draw).prefills:
        row, slot = draw.arange(tokens, torch.int64) * 0, draw.arange(tokens, torch.int64)
        yield Point(f"{tokens}", draw.args(row, slot, 64), moved(row, slot))


def _steps(net: Net) -> list[tuple[int, int]]:
    """(rows, tokens per row) of decode steps and of prefills."""
    return [(rows, 1) for rows in net.batches] + [(1, tokens) for tokens in net.prefills]


@fused_qkvzba_split_reshape_cat.bench
@fused_qkvzba_split_reshape_cat_contiguous.bench
def _(draw: Draw) -> Points:
    net = net_of(draw)
    heads, dims = (net.key_heads, net.value_heads), (net.key_dim, net.value_dim)
    for tokens in (*net.batches, *net.prefills):
        given = mixed_inputs(draw, tokens, heads, dims, draw.dtype)
        mixed, ba = given.args[:2]
        yield Point(f"{tokens} x {mixed.shape[1]}", given, moved(mixed, mixed, ba, ba))
