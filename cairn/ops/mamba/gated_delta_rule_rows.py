"""The gated delta rule with its gates over the rows of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, INT32, expect
from cairn.ops.mamba import launch, recurrence, segments, states, tuning
from cairn.ops.mamba.causal_conv1d_rows import expect_rows
from cairn.ops.mamba.gates import expect_gates, log_decay, strength
from cairn.ops.mamba.recurrence import CHUNK, FEW, Tokens
from cairn.ops.registry import op

NAME = "gated_delta_rule_rows"
SOFTPLUS = (1.0, 20.0)
"""beta and threshold of softplus."""


@op(mutates=("states",))
def gated_delta_rule_rows(
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    states: Tensor,
    starts: Tensor,
    slots: Tensor,
    stored: Tensor,
    has_initial_state: Tensor,
    first: Tensor,
    longest: int,
) -> Tensor:
    """`fused_sigmoid_gating_delta_rule_update` for sequences of any length, with q and k divided by
    their l2 norms and q scaled by K^-1/2.

    Sequences of more than 16 tokens run in chunks of 64 that start at slots that are multiples of
    64, so that cutting a prompt at such a slot does not change a bit: the tokens after the last
    multiple run like a sequence of their own.

    Args:
        A_log, dt_bias: [HV].
        a, b: [T, HV], inputs of the decay and of the write strength.
        q, k: [T, H, K] float32, bfloat16 or float16.
        v: [T, HV, V], HV a multiple of H.
        states: [slots, HV, V, K] float32, changed.
        starts, slots, stored, has_initial_state, longest: as in `causal_conv1d_rows`.
        first: [N] int32, slots of the sequences' first tokens.
    Returns:
        o [T, HV, V] of v's dtype; 0 after the last sequence.
    Raises:
        BadArgument: for another shape, dtype or device; on the CPU for slots out of range.
    """
    tokens = _tokens(A_log, a, dt_bias, q, k, v, b)
    spans = segments.spans(starts, 1, len(q))
    state = _load(states, slots, has_initial_state, len(spans), v)
    out = torch.zeros_like(tokens.v)
    recurrence.by_token(tokens, state, spans, out)
    _store(states, stored, state)
    return out.to(v.dtype)


def _tokens(
    a_log: Tensor, a: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, b: Tensor
) -> Tokens:
    decay = log_decay(a_log, a, dt_bias, *SOFTPLUS).unsqueeze(-1)
    return recurrence.prepared(q[None], k[None], v[None], decay, strength(b), None, True)


def _load(pool: Tensor, slots: Tensor, has_initial_state: Tensor, count: int, v: Tensor) -> Tensor:
    _, heads, high, wide = pool.shape
    return states.load(pool, slots, has_initial_state, count, (heads, high, wide), v.device)


def _store(pool: Tensor, stored: Tensor, state: Tensor) -> None:
    states.store(pool, stored, state)


@gated_delta_rule_rows.fake
def _(call: Call) -> Tensor:
    return torch.empty(call.v.shape, dtype=call.v.dtype, device=call.v.device)


@gated_delta_rule_rows.check
def _(call: Call) -> None:
    states.expect_heads(NAME, call.q[None], call.k[None], call.v[None])
    heads = call.v.shape[1]
    for name, given in (("a", call.a), ("b", call.b)):
        expect(NAME, name, given, call.v.shape[:2], FLOATS, call.q)
    expect_gates(NAME, call.A_log, call.dt_bias, heads, call.q)
    shape = (None, heads, call.v.shape[2], call.q.shape[2])
    expect(NAME, "states", call.states, shape, (torch.float32,), call.q)
    expect_rows(NAME, call, call.states.shape[0], len(call.q))
    expect(NAME, "first", call.first, call.slots.shape, INT32, call.q)


def cut(span: range, first: int) -> list[range]:
    """Parts of a sequence whose first token is in slot `first`: the tokens up to a multiple of
    CHUNK, whole chunks, and the rest. How a part is run depends only on its own length, so the last
    part of a prompt gives the same bits whether or not the prompt was cut before it."""
    end = first + len(span)
    head = min(end, -(-first // CHUNK) * CHUNK)
    tail = max(head, end // CHUNK * CHUNK)
    begin = span.start - first
    return [range(begin + x, begin + y) for x, y in pairwise((first, head, tail, end)) if y > x]


@gated_delta_rule_rows.implementation(
    "torch", devices=("cpu",), when=lambda call: call.longest > FEW
)
def _(call: Call) -> Tensor:
    """Parts of up to FEW tokens token by token, others in chunks."""
    tokens = _tokens(call.A_log, call.a, call.dt_bias, call.q, call.k, call.v, call.b)
    spans = segments.spans(call.starts, 1, len(call.q))
    state = _load(call.states, call.slots, call.has_initial_state, len(spans), call.v)
    out = torch.zeros_like(tokens.v)
    parts = [cut(span, at) for span, at in zip(spans, call.first.tolist(), strict=True)]
    for number in range(3):
        _run([own[number] if number < len(own) else range(0) for own in parts], tokens, state, out)
    _store(call.states, call.stored, state)
    return out.to(call.v.dtype)


def _run(spans: Sequence[range], tokens: Tokens, state: Tensor, out: Tensor) -> None:
    """Run one part of every sequence from its state [N, HV, V, K]."""
    for run, few in ((recurrence.by_token, True), (recurrence.by_chunk, False)):
        chosen = [n for n, span in enumerate(spans) if span and (len(span) <= FEW) == few]
        own = state[chosen]
        run(tokens, own, [spans[n] for n in chosen], out)
        state[chosen] = own


@gated_delta_rule_rows.implementation(
    "triton",
    devices=gpu.DEVICES,
    when=lambda call: call.q.shape[2] <= launch.WIDEST and len(call.slots) <= launch.MAX_SEQUENCES,
    replayed=True,
)
def _(call: Call) -> Tensor:
    q, k, v, a, b = (launch.in_order(x, 1) for x in (call.q, call.k, call.v, call.a, call.b))
    rule = launch.Rule(q, k, v, a, b, call.A_log, call.dt_bias, q.shape[2] ** -0.5, True, *SOFTPLUS)
    of = launch.Sequences(
        len(call.slots), 0, call.starts, call.slots, call.stored, call.has_initial_state, call.first
    )
    if not of.count:
        return gpu.zeros(v.shape, v.dtype, v.device)
    out = gpu.empty(v.shape, v.dtype, v.device)
    if call.longest <= FEW or not tuning.in_chunks(v.device, v.dtype):
        launch.run_tokens(
            rule, call.states, dataclasses.replace(of, first=None), out, tokens=len(v)
        )
    else:
        launch.run_chunks(rule, call.states, of, out, few_apart=True)
        launch.run_tokens(rule, call.states, of, out)
    return out


gated_delta_rule_rows.tolerance(
    {torch.float32: (2e-4, 2e-5), torch.bfloat16: (2e-2, 1e-2)},
    "sums of products of a whole chunk are taken in another order, and a small o is the difference "
    "of large ones",
)
