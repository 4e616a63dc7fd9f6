"""The gated delta rule with its gates over the next tokens of every sequence, also for draft
tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, INDICES, expect, expect_within, refuse
from cairn.ops.mamba import launch, recurrence, segments, states
from cairn.ops.mamba.gates import expect_gates, log_decay, strength
from cairn.ops.mamba.recurrence import Tokens
from cairn.ops.registry import op

NAME = "fused_sigmoid_gating_delta_rule_update"


@op(mutates=("initial_state_source", "intermediate_states_buffer"))
def fused_sigmoid_gating_delta_rule_update(
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    softplus_beta: float,
    softplus_threshold: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    initial_state_source: Tensor | None,
    initial_state_indices: Tensor | None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    is_kda: bool = False,
    disable_state_update: bool = False,
    intermediate_states_buffer: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    cache_steps: int | None = None,
    retrieve_parent_token: Tensor | None = None,
    *,
    has_initial_state: Tensor | None = None,
) -> Tensor:
    """`chunk_gated_delta_rule` token by token, of g = -e^A_log * softplus(a + dt_bias) and beta =
    sigmoid(b), which are not rounded in between.

    For verification of drafts, `disable_state_update` keeps the states unchanged, and the state
    after every step is written to `intermediate_states_buffer`, from which the accepted one can be
    taken. In a tree of drafts a step continues from the state after its parent.

    Args:
        A_log, dt_bias: [HV]; with `is_kda` dt_bias is [HV, K] or [HV * K].
        a: [B * T, HV] or [B, T, HV]; with `is_kda` also with K columns for each head: [..., HV, K]
            or [..., HV * K], a decay for each column of the state.
        softplus_beta, softplus_threshold: as in `fused_gdn_gating`.
        q, k, v, scale, use_qk_l2norm_in_kernel, cu_seqlens, has_initial_state: as in
            `chunk_gated_delta_rule`.
        b: [B * T, HV] or [B, T, HV].
        initial_state_source: [slots, HV, V, K] float32, changed; or None.
        initial_state_indices: [N], as in `chunk_gated_delta_rule`. A negative slot: the sequence
            starts from zeros and stores nothing.
        is_kda: see `a`.
        disable_state_update: `initial_state_source` is not changed.
        intermediate_states_buffer: [rows, steps, HV, V, K], changed: the state after step j of
            sequence n goes to row intermediate_state_indices[n], step j.
        intermediate_state_indices: [N] int32 or int64; a negative row is not written. None: n.
        cache_steps: number of steps of the buffer, for a check; None: not checked.
        retrieve_parent_token: [N, steps] int32 or int64, the parent of step j, less than j: step j
            continues from the state after it; negative: from the initial state. None: j - 1.
    Returns:
        o [B, T, HV, V] of v's dtype.
    Raises:
        BadArgument: for another shape, dtype or device; on the CPU for slots out of range.
    """
    gates = (A_log, a, dt_bias, softplus_beta, softplus_threshold, b)
    tokens = _tokens(q, k, v, gates, scale, use_qk_l2norm_in_kernel, is_kda)
    spans = segments.spans(cu_seqlens, *q.shape[:2])
    pool, slots, used = initial_state_source, initial_state_indices, has_initial_state
    shape = (v.shape[2], v.shape[3], q.shape[3])
    state = states.load(pool, slots, used, len(spans), shape, v.device)
    out = torch.zeros_like(tokens.v)
    if intermediate_states_buffer is None and retrieve_parent_token is None:
        recurrence.by_token(tokens, state, spans, out)
    else:
        buffer, kept = intermediate_states_buffer, intermediate_state_indices
        _by_draft(tokens, state, spans, buffer, kept, retrieve_parent_token, out)
    if not disable_state_update:
        states.store(pool, slots, state)
    return out.to(v.dtype).view(v.shape)


def _tokens(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: tuple[Tensor, Tensor, Tensor, float, float, Tensor],
    scale: float | None,
    normalised: bool,
    by_column: bool,
) -> Tokens:
    """`Tokens` from the op's arguments; gates are A_log, a, dt_bias, beta and threshold of
    softplus, and b."""
    a_log, a, dt_bias, slope, threshold, b = gates
    heads, rows = v.shape[2], v.shape[0] * v.shape[1]
    columns = (q.shape[3],) if by_column else ()
    a, dt_bias = a.reshape(rows, heads, *columns), dt_bias.reshape(heads, *columns)
    decay = log_decay(a_log, a, dt_bias, slope, threshold)
    decay = decay if by_column else decay.unsqueeze(-1)
    beta = strength(b.reshape(rows, heads))
    return recurrence.prepared(q, k, v, decay, beta, scale, normalised)


def _by_draft(
    tokens: Tokens,
    state: Tensor,
    spans: list[range],
    buffer: Tensor | None,
    kept: Tensor | None,
    parents: Tensor | None,
    out: Tensor,
) -> None:
    """`by_token` that stores the state after every token, and continues from that of its parent."""
    count = len(spans)
    rows = list(range(count)) if kept is None else kept.tolist()
    links = [None] * count if parents is None else parents.tolist()
    for n, span in enumerate(spans):
        after = _drafted(tokens, state[n : n + 1], span, links[n], out)
        if after and buffer is not None and rows[n] >= 0:
            buffer[rows[n], : len(after)] = torch.cat(after).to(buffer.dtype)


def _drafted(
    tokens: Tokens, state: Tensor, span: range, parents: list[int] | None, out: Tensor
) -> list[Tensor]:
    """States [1, HV, V, K] after each token of a sequence; `state` becomes the last one."""
    after: list[Tensor] = []
    for number, place in enumerate(span):
        parent = number - 1 if parents is None else parents[number]
        current = (state if parent < 0 else after[parent]).clone()
        row = slice(place, place + 1)
        out[row] = recurrence.step(current, tokens, row)
        after.append(current)
    if after:
        state.copy_(after[-1])
    return after


@fused_sigmoid_gating_delta_rule_update.implementation(
    "triton", devices=gpu.DEVICES, when=lambda call: call.q.shape[3] <= launch.WIDEST
)
def _(call: Call) -> Tensor:
    q, k, v = (launch.in_order(x) for x in (call.q, call.k, call.v))
    tokens, heads, wide = len(q), v.shape[1], q.shape[2]
    columns = (wide,) if call.is_kda else ()
    a = launch.in_order(call.a.reshape(tokens, heads, *columns), 1)
    b = launch.in_order(call.b.reshape(tokens, heads), 1)
    bias = call.dt_bias.reshape(heads, *columns).contiguous()
    scale = wide**-0.5 if call.scale is None else call.scale
    rule = launch.Rule(
        q,
        k,
        v,
        a,
        b,
        call.A_log,
        bias,
        scale,
        call.use_qk_l2norm_in_kernel,
        call.softplus_beta,
        call.softplus_threshold,
    )
    starts, slots = call.cu_seqlens, call.initial_state_indices
    count = call.q.shape[0] if starts is None else starts.shape[0] - 1
    of = launch.Sequences(
        count, call.q.shape[1], starts, slots, has_initial_state=call.has_initial_state
    )
    out = gpu.empty(call.v.shape, call.v.dtype, call.v.device)
    if not count:
        out.zero_()
    launch.run_tokens(
        rule,
        call.initial_state_source,
        of,
        out,
        not call.disable_state_update,
        call.intermediate_states_buffer,
        call.intermediate_state_indices,
        call.retrieve_parent_token,
        tokens,
    )
    return out


@fused_sigmoid_gating_delta_rule_update.fake
def _(call: Call) -> Tensor:
    return torch.empty(call.v.shape, dtype=call.v.dtype, device=call.v.device)


@fused_sigmoid_gating_delta_rule_update.check
def _(call: Call) -> None:
    states.expect_heads(NAME, call.q, call.k, call.v)
    heads, dim = call.v.shape[2], call.q.shape[3]
    columns = dim if call.is_kda else 1
    expect(NAME, "A_log", call.A_log, (heads,), FLOATS, call.q)
    expect(NAME, "a", call.a, dtypes=FLOATS, like=call.q)
    expect(NAME, "dt_bias", call.dt_bias, dtypes=FLOATS, like=call.q)
    expect(NAME, "b", call.b, dtypes=FLOATS, like=call.q)
    if not call.is_kda:
        expect_gates(NAME, call.A_log, call.dt_bias, heads, call.q)
    rows = call.q.shape[0] * call.q.shape[1]
    for name, given, size in (
        ("a", call.a, columns),
        ("b", call.b, 1),
        ("dt_bias", call.dt_bias, columns),
    ):
        wanted = heads * size * (1 if name == "dt_bias" else rows)
        if given.numel() != wanted:
            what = f"{wanted} numbers for {heads} heads"
            refuse(NAME, name, f"has shape {list(given.shape)}, not {what} and {rows} tokens")
    count = call.q.shape[0]
    if call.cu_seqlens is not None:
        if count != 1:
            refuse(
                NAME, "q", f"has shape {list(call.q.shape)}, not [1, T, H, K], as with `cu_seqlens`"
            )
        segments.expect_starts(NAME, "cu_seqlens", call.cu_seqlens, call.q.shape[1], call.q)
        count = call.cu_seqlens.shape[0] - 1
    names = ("initial_state_source", "initial_state_indices")
    pool, shape = call.initial_state_source, (heads, call.v.shape[3], dim)
    states.expect_pool(NAME, names, pool, call.initial_state_indices, count, shape, call.q)
    states.expect_used(NAME, call.has_initial_state, count, call.q)
    steps = _longest(call.cu_seqlens, call.q.shape[1])
    buffer, kept = call.intermediate_states_buffer, call.intermediate_state_indices
    _expect_buffer(buffer, kept, call.cache_steps, (count, steps, *shape), call.q)
    _expect_parents(call.retrieve_parent_token, count, steps, call.q)


def _longest(starts: Tensor | None, tokens: int) -> int:
    """Tokens of the longest sequence; 0 where lengths are on a device, to avoid a sync."""
    if starts is None:
        return tokens
    if starts.device.type != "cpu" or starts.shape[0] < 2:
        return 0
    return int(starts.diff().max())


def _expect_buffer(
    buffer: Tensor | None,
    kept: Tensor | None,
    cache_steps: int | None,
    least: tuple[int, ...],
    like: Tensor,
) -> None:
    """Raise BadArgument unless the buffer has room for `least` (N, steps, HV, V, K)."""
    name = "intermediate_states_buffer"
    if buffer is not None:
        expect(NAME, name, buffer, (None, None, *least[2:]), FLOATS, like)
        if buffer.shape[1] < least[1]:
            refuse(NAME, name, f"has {buffer.shape[1]} steps, not {least[1]} or more")
        if cache_steps is not None and cache_steps != buffer.shape[1]:
            refuse(NAME, "cache_steps", f"is {cache_steps!r}, not {buffer.shape[1]}, the buffer's")
        if kept is None and buffer.shape[0] < least[0]:
            refuse(NAME, name, f"has {buffer.shape[0]} rows for {least[0]} sequences")
    if kept is not None:
        expect(NAME, "intermediate_state_indices", kept, least[:1], INDICES, like)
        if buffer is not None:
            expect_within(NAME, "intermediate_state_indices", kept, buffer.shape[0], None)


def _expect_parents(parents: Tensor | None, count: int, steps: int, like: Tensor) -> None:
    """Raise BadArgument unless parents are [N, steps or more], each less than its step."""
    if parents is None:
        return
    name = "retrieve_parent_token"
    expect(NAME, name, parents, (count, None), INDICES, like)
    if parents.shape[1] < steps:
        refuse(NAME, name, f"has shape {list(parents.shape)}, not [{count}, {steps} or more]")
    if parents.device.type == "cpu" and parents[:, :steps].numel():
        own = torch.arange(steps, device=parents.device)
        if bool((parents[:, :steps] >= own).any()):
            refuse(NAME, name, "names a step that is not before its own")
