"""Test cases of this family's ops."""

from __future__ import annotations

import torch
from torch import Tensor

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
from cairn.ops.testing import Arguments, Cases, Make


@causal_conv1d_fn_cpu.cases
def _(make: Make) -> Cases:
    starts = make.tensor([0, 6, 6, 8], torch.int32)
    slot = make.tensor([2, 0, -1], torch.int32)
    used = make.tensor([True, True, False], torch.bool)
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = make.randn(5, 9, dtype=dtype), make.randn(5, 4, dtype=dtype)
        states = make.randn(3, 5, 3, dtype=dtype)
        yield make.args(x, weight, None, "silu", states, used, slot, starts, [6, 0, 2])
        bias = make.randn(5, dtype=dtype)
        yield make.args(x, weight, bias, None, None, None, None, starts, None)


@causal_conv1d_update_cpu.cases
def _(make: Make) -> Cases:
    slot = make.tensor([2, -1, 1], torch.int32)
    for dtype in (torch.float32, torch.bfloat16):
        weight, states = make.randn(5, 4, dtype=dtype), make.randn(3, 5, 3, dtype=dtype)
        bias = make.randn(5, dtype=dtype)
        yield make.args(make.randn(3, 5, dtype=dtype), states, weight, bias, "silu", slot)
        yield make.args(make.randn(3, 5, 2, dtype=dtype), states, weight, None, None, None)


@causal_conv1d_fwd.cases
def _(make: Make) -> Cases:
    def words(*numbers: int) -> Tensor:
        return make.tensor(numbers, torch.int32)

    def flags(*values: bool) -> Tensor:
        return make.tensor(values, torch.bool)

    for dtype in (torch.float32, torch.bfloat16):
        weight, bias = make.randn(6, 4, dtype=dtype), make.randn(6, dtype=dtype)
        states = make.randn(5, 6, 3, dtype=dtype)
        states[3] = torch.nan
        # Sequences: long; without initial state in a slot of NaN; empty; short; one to skip.
        starts, slot = words(0, 9, 14, 14, 15, 17, 20), words(1, 3, 0, 4, 2, -1)
        used = flags(True, False, True, True, True, True)
        x = make.randn(6, 22, dtype=dtype)
        yield make.args(x, weight, bias, states, starts, slot, used, True, -1)
        yield make.args(x, weight, None, states, starts, slot, None, False, -1)
        x = make.randn(2, 6, 5, dtype=dtype)
        yield make.args(x, weight, bias, None, None, None, None, True, -1)
        longer = make.randn(2, 6, 7, dtype=dtype)
        yield make.args(x, weight, bias, longer, None, None, flags(True, True), True, -1)
    narrow = make.randn(3, 1)
    yield make.args(make.randn(3, 4), narrow, None, None, words(0, 4), None, None, False, -1)
    yield make.args(make.randn(3, 0), narrow, None, None, words(0), None, None, True, -1)


@causal_conv1d_update.cases
def _(make: Make) -> Cases:
    def words(*numbers: int) -> Tensor:
        return make.tensor(numbers, torch.int32)

    for dtype in (torch.float32, torch.bfloat16):
        weight, bias = make.randn(6, 4, dtype=dtype), make.randn(6, dtype=dtype)
        states, longer = (make.randn(5, 6, size, dtype=dtype) for size in (3, 8))
        x, slot = make.randn(4, 6, 1, dtype=dtype), words(3, 0, -1, 4)
        yield make.args(x, states, weight, bias, True, None, slot, -1)
        yield make.args(x, states, weight, None, False, None, None, -1)
        more = make.randn(4, 6, 4, dtype=dtype)
        yield make.args(more, longer, weight, bias, True, None, slot, -9)
        yield make.args(more, longer, weight, bias, True, words(0, 7, 3, 100), slot, -1)
    yield make.args(make.randn(0, 6, 1), make.randn(2, 6, 1), make.randn(6, 2), None, True, None,
                    make.tensor([], torch.int32), -1)  # fmt: skip


@gated_delta_rule.cases
def _(make: Make) -> Cases:
    def drawn(batch: int, tokens: int, heads: tuple[int, int], dims: tuple[int, int],
              dtype: torch.dtype = torch.float32) -> list[Tensor]:  # fmt: skip
        q, k = (make.randn(batch, tokens, heads[0], dims[0], dtype=dtype) for _ in range(2))
        v = make.randn(batch, tokens, heads[1], dims[1], dtype=dtype)
        # Decays from almost none to a full reset in one token.
        g = -make.rand(batch, tokens, heads[1]) * 10 ** make.randn(heads[1])
        return [q, k, v, g, make.rand(batch, tokens, heads[1], dtype=dtype)]

    def words(*numbers: int) -> Tensor:
        return make.tensor(numbers, torch.int32)

    for dtype in (torch.float32, torch.bfloat16):
        pool = make.randn(5, 4, 8, 12)
        pool[3] = torch.nan
        starts, slot = words(0, 1, 1, 18, 90, 155), words(2, 0, 4, -1, 3)
        used = make.tensor([True, True, True, True, False], torch.bool)
        given = drawn(1, 160, (2, 4), (12, 8), dtype)
        yield make.args(*given, pool, None, slot, starts, True, used)
        given = drawn(2, 5, (1, 3), (8, 16), dtype)
        yield make.args(*given, make.randn(2, 3, 16, 8), 0.1, None, None, True)
    given = drawn(2, 70, (2, 2), (8, 8))
    yield make.args(*given, make.randn(2, 2, 8, 8), use_qk_l2norm_in_kernel=True)
    given = drawn(1, 0, (2, 2), (8, 8))
    yield make.args(*given, make.randn(2, 2, 8, 8), None, words(0), words(0, 0))


@fused_gdn_gating.cases
def _(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16):
        a, b = (make.randn(7, 6, dtype=dtype, scale=4.0) for _ in range(2))
        yield make.args(make.randn(6), a, b, make.randn(6, dtype=dtype))
    yield make.args(make.randn(6), a, b, make.randn(6), 0.5, 1.0)
    yield make.args(make.randn(6), a[:0], b[:0], make.randn(6))


@fused_sigmoid_gating_delta_rule_update.cases
def _(make: Make) -> Cases:
    def words(*numbers: int) -> Tensor:
        return make.tensor(numbers, torch.int32)

    def vectors(tokens: int, heads: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
        q, k = (make.randn(1, tokens, heads[0], 8, dtype=dtype) for _ in range(2))
        v = make.randn(1, tokens, heads[1], 12, dtype=dtype)
        return [q, k, v, make.randn(tokens, heads[1], dtype=dtype)]

    rate, bias = make.randn(4), make.randn(4)
    for dtype in (torch.float32, torch.bfloat16):
        pool = make.randn(5, 4, 12, 8)
        pool[2] = torch.nan
        a, given = make.randn(4, 4, dtype=dtype), vectors(4, (2, 4), dtype)
        head = (rate, a, bias, 1.0, 20.0, *given, pool)
        used = make.tensor([True, True, False, True], torch.bool)
        slot, starts = words(3, -1, 2, 0), words(0, 1, 2, 3, 4)
        yield make.args(*head, slot, None, True, starts, has_initial_state=used)
        q, k, v, b = vectors(6, (4, 4), dtype)
        a = make.randn(6, 4, dtype=dtype)
        drafts = {"disable_state_update": True, "use_qk_l2norm_in_kernel": True}
        buffer = make.full((4, 3, 4, 12, 8), 0.5)
        pairs = [x.view(2, 3, *x.shape[2:]) for x in (q, k, v)]
        yield make.args(
            rate,
            a,
            bias,
            1.0,
            20.0,
            *pairs,
            b,
            pool,
            words(1, 3),
            **drafts,
            intermediate_states_buffer=buffer,
            intermediate_state_indices=words(2, 0),
            cache_steps=3,
            retrieve_parent_token=make.tensor([[-1, 0, 0], [-1, 0, 1]], torch.int32),
        )
    q, k, v, b = vectors(5, (2, 4), torch.float32)
    wide, shift = make.randn(5, 4, 8), make.randn(4, 8)
    yield make.args(rate, wide, shift, 0.5, 2.0, q, k, v, b, None, None, is_kda=True)


@causal_conv1d_rows.cases
def _(make: Make) -> Cases:
    def words(*numbers: int) -> Tensor:
        return make.tensor(numbers, torch.int32)

    for dtype in (torch.float32, torch.bfloat16):
        weight, states = make.randn(6, 4, dtype=dtype), make.randn(6, 6, 3, dtype=dtype)
        states[3] = torch.nan
        # Sequences: long; without initial state in a slot of NaN; one that is stored to its own
        # slot; empty; one without a slot; then padding.
        starts, slot = words(0, 20, 25, 26, 26, 28), words(1, 3, 0, 4, -1)
        stored = words(1, 3, -1, 4, 5)
        has_initial_state = make.tensor([True, False, True, True, True], torch.bool)
        wide = make.randn(31, 9, dtype=dtype)
        yield make.args(wide[:, 1:7], weight, states, starts, slot, stored, has_initial_state, 20)
        few = words(0, 1, 3, 3, 4, 6)
        yield make.args(wide[:8, :6], weight, states, few, slot, stored, has_initial_state, 2)


@gated_delta_rule_rows.cases
def _(make: Make) -> Cases:
    def words(*numbers: int) -> Tensor:
        return make.tensor(numbers, torch.int32)

    def drawn(tokens: int, dtype: torch.dtype) -> list[Tensor]:
        mixed = make.randn(tokens, 2 * 2 * 12 + 4 * 8 + 4, dtype=dtype)
        q, k, v = mixed[:, :-4].split((24, 24, 32), dim=1)
        q, k, v = q.unflatten(1, (2, 12)), k.unflatten(1, (2, 12)), v.unflatten(1, (4, 8))
        # Decays from almost none to a full reset in one token.
        a_log, dt_bias = 2 * make.randn(4), make.randn(4)
        return [a_log, make.randn(tokens, 4, dtype=dtype), dt_bias, q, k, v, mixed[:, -4:]]

    for dtype in (torch.float32, torch.bfloat16):
        pool = make.randn(7, 4, 8, 12)
        pool[3] = torch.nan
        # Sequences: from inside a chunk across two chunk borders; without initial state in a slot
        # of NaN, ending after a border; one token; one that is stored to its own slot; one without
        # a slot; empty; then padding.
        starts = words(0, 90, 160, 161, 190, 215, 215)
        slot, stored = words(1, 3, 0, 5, -1, 2), words(1, 3, 0, -1, -1, 2)
        has_initial_state = make.tensor([True, False, True, True, True, True], torch.bool)
        first = words(60, 0, 63, 10, 70, 5)
        rest = (pool, starts, slot, stored, has_initial_state, first)
        yield make.args(*drawn(220, dtype), *rest, 90)
        few = words(0, 1, 4, 5, 7, 8, 8)
        yield make.args(*drawn(10, dtype), pool, few, slot, stored, has_initial_state, first, 3)


@ragged_rows.cases
def _(make: Make) -> Cases:
    def longs(*numbers: int) -> Tensor:
        return make.tensor(numbers, torch.int64)

    yield make.args(longs(2, 2, 2, 0, 1, 1, 0, 0), longs(4, 5, 6, 9, 0, 1, -1, -1), 5)
    yield make.args(longs(3, 1, 0), longs(7, 0, 3), 3)
    yield make.args(longs(0, 0), longs(-1, -1), 2)
    yield make.args(longs(), longs(), 2)


def mixed_inputs(
    make: Make, tokens: int, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype
) -> Arguments:
    """Arguments of the splits; heads and dims are those of keys and of values."""
    columns = 2 * (heads[0] * dims[0] + heads[1] * dims[1])
    mixed = make.randn(tokens, columns, dtype=dtype)
    return make.args(mixed, make.randn(tokens, 2 * heads[1], dtype=dtype), *heads, *dims)


@fused_qkvzba_split_reshape_cat.cases
@fused_qkvzba_split_reshape_cat_contiguous.cases
def _(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16):
        yield mixed_inputs(make, 5, (2, 6), (8, 4), dtype)
        yield mixed_inputs(make, 1, (3, 3), (4, 12), dtype)
    yield mixed_inputs(make, 0, (2, 4), (4, 4), torch.float32)
