"""The gated delta rule over whole sequences, or over their next tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, expect, refuse
from cairn.ops.mamba import launch, recurrence, segments, states, tuning
from cairn.ops.mamba.recurrence import FEW
from cairn.ops.registry import op

NAME = "chunk_gated_delta_rule"


@op(mutates=("initial_state",))
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    scale: float | None = None,
    initial_state_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    has_initial_state: Tensor | None = None,
) -> Tensor:
    """`chunk_gated_delta_rule` with a fixed order of axes, required states, and one result, o [B,
    T, HV, V].

    The definition is the recurrence, token by token.
    """
    slots, used = initial_state_indices, has_initial_state
    rest = (scale, initial_state, slots, used, cu_seqlens, use_qk_l2norm_in_kernel)
    return _run(q, k, v, g, beta, *rest, recurrence.by_token)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    pool: Tensor,
    slots: Tensor | None,
    used: Tensor | None,
    starts: Tensor | None,
    normalised: bool,
    longer: Callable[..., None],
) -> Tensor:
    """Run sequences of up to FEW tokens token by token, others by `longer`."""
    spans = segments.spans(starts, *q.shape[:2])
    decay, strength = g.flatten(0, 1).unsqueeze(-1), beta.flatten(0, 1)
    tokens = recurrence.prepared(q, k, v, decay, strength, scale, normalised)
    shape = (v.shape[2], v.shape[3], q.shape[3])
    state = states.load(pool, slots, used, len(spans), shape, v.device)
    out = torch.zeros_like(tokens.v)
    for run, short in ((recurrence.by_token, True), (longer, False)):
        chosen = [n for n, span in enumerate(spans) if (len(span) <= FEW) == short]
        own = state[chosen]
        run(tokens, own, [spans[n] for n in chosen], out)
        state[chosen] = own
    states.store(pool, slots, state)
    return out.to(v.dtype).view(v.shape)


@gated_delta_rule.fake
def _(call: Call) -> Tensor:
    return torch.empty(call.v.shape, dtype=call.v.dtype, device=call.v.device)


@gated_delta_rule.check
def _(call: Call) -> None:
    states.expect_heads(NAME, call.q, call.k, call.v)
    expect(NAME, "g", call.g, call.v.shape[:3], FLOATS, call.q)
    expect(NAME, "beta", call.beta, call.v.shape[:3], FLOATS, call.q)
    count = call.q.shape[0]
    if call.cu_seqlens is not None:
        if count != 1:
            refuse(
                NAME, "q", f"has shape {list(call.q.shape)}, not [1, T, H, K], as with `cu_seqlens`"
            )
        segments.expect_starts(NAME, "cu_seqlens", call.cu_seqlens, call.q.shape[1], call.q)
        count = call.cu_seqlens.shape[0] - 1
    shape = (call.v.shape[2], call.v.shape[3], call.q.shape[3])
    names = ("initial_state", "initial_state_indices")
    expect(NAME, names[0], call.initial_state, (None, *shape), (torch.float32,), call.q)
    states.expect_pool(
        NAME, names, call.initial_state, call.initial_state_indices, count, shape, call.q
    )
    states.expect_used(NAME, call.has_initial_state, count, call.q)


def _fits(call: Call) -> bool:
    """Whether the kernels support the state's size and the number of sequences."""
    starts = call.cu_seqlens
    count = call.q.shape[0] if starts is None else starts.shape[0] - 1
    return call.q.shape[3] <= launch.WIDEST and count <= launch.MAX_SEQUENCES


@gated_delta_rule.implementation("triton", devices=gpu.DEVICES, when=_fits)
def _(call: Call) -> Tensor:
    q, k, v, g, beta = (launch.in_order(x) for x in (call.q, call.k, call.v, call.g, call.beta))
    scale = call.q.shape[3] ** -0.5 if call.scale is None else call.scale
    starts, used = call.cu_seqlens, call.has_initial_state
    count = call.q.shape[0] if starts is None else starts.shape[0] - 1
    of = launch.Sequences(
        count, call.q.shape[1], starts, call.initial_state_indices, has_initial_state=used
    )
    rule = launch.Rule(q, k, v, g, beta, None, None, scale, call.use_qk_l2norm_in_kernel)
    out = gpu.empty(call.v.shape, call.v.dtype, call.v.device)
    if not count:
        return out.zero_()
    if tuning.in_chunks(out.device, v.dtype):
        launch.run_chunks(rule, call.initial_state, of, out.flatten(0, 1))
    else:
        launch.run_tokens(rule, call.initial_state, of, out.flatten(0, 1), tokens=len(v))
    return out


def _not_short(call: Call) -> bool:
    """Whether some sequence may be longer than FEW."""
    return call.q.shape[1] > FEW


@gated_delta_rule.implementation("torch", when=_not_short)
def _(call: Call) -> Tensor:
    """Sequences of more than FEW tokens in chunks of 64 from their first token on: without
    positions, chunks cannot be aligned to multiples of 64 of a longer sequence. Whether a sequence
    runs in chunks depends on its own length only."""
    slots, used = call.initial_state_indices, call.has_initial_state
    rest = (
        call.scale,
        call.initial_state,
        slots,
        used,
        call.cu_seqlens,
        call.use_qk_l2norm_in_kernel,
    )
    return _run(call.q, call.k, call.v, call.g, call.beta, *rest, recurrence.by_chunk)


@gated_delta_rule.front
def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    has_initial_state: Tensor | None = None,
) -> tuple[Tensor, None, None]:
    """The gated delta rule (Yang, Kautz and Hatamizadeh 2024), in float32, o rounded once.

    A token updates the state S [V, K] of each head: S = e^g S, u = beta (v - S k), S = S + u k^T, o
    = S (scale q). Value head j uses key head j // (HV / H).

    Args:
        q, k: [B, T, H, K] float32, bfloat16 or float16.
        v: [B, T, HV, V], HV a multiple of H.
        g: [B, T, HV], the logarithm of the decay, at most 0; preferably float32.
        beta: [B, T, HV], strength of the write.
        scale: q is multiplied by it; None: K^-1/2.
        initial_state: [slots, HV, V, K] float32, read and changed. None: all start from zeros and
            nothing is stored.
        initial_state_indices: [N] int32 or int64, the slot of each sequence. A negative slot: the
            sequence starts from zeros and stores nothing. None: sequence n has slot n.
        cu_seqlens: [N + 1] int32 or int64: B is 1, and sequence n has tokens cu_seqlens[n] ..
            cu_seqlens[n + 1] - 1. Outputs after the last sequence are 0. None: N is B.
        head_first: the axes of tokens and heads are swapped, in results too.
        use_qk_l2norm_in_kernel: q and k are divided by sqrt(sum of squares + 1e-6) first.
        has_initial_state: [N] bool; False: the sequence starts from zeros, whatever its slot holds,
            and is stored there. None: all start from their slots.
    Returns:
        o [B, T, HV, V] of v's dtype, None, None.
    Raises:
        BadArgument: for another shape, dtype or device; on the CPU for slots out of range.
    """
    q, k, v, g, beta = _tokens_first(head_first, q, k, v, g, beta)
    if initial_state is None:
        # torch.compile does not support an op whose mutated argument is None.
        initial_state, initial_state_indices = _zeros(q, k, v, cu_seqlens), None
    o = gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        initial_state,
        scale,
        initial_state_indices,
        cu_seqlens,
        use_qk_l2norm_in_kernel,
        has_initial_state,
    )
    return o.transpose(1, 2) if head_first else o, None, None


@gated_delta_rule.front
def chunk_gated_delta_rule_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    head_first: bool,
    use_qk_l2norm_in_kernel: bool,
) -> tuple[Tensor, Tensor, None]:
    """`chunk_gated_delta_rule` that returns its states, with the axis of keys before that of
    values.

    Args:
        q, k, v, g, beta, cu_seqlens, head_first, use_qk_l2norm_in_kernel: as in
            `chunk_gated_delta_rule`.
        initial_state: [N, HV, K, V] float32, not changed; None: zeros.
    Returns:
        o [B, T, HV, V], the states after the last tokens [N, HV, K, V] float32, None.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    q, k, v, g, beta = _tokens_first(head_first, q, k, v, g, beta)
    if initial_state is None:
        state = _zeros(q, k, v, cu_seqlens)
    else:
        expect(NAME, "initial_state", initial_state, 4, (torch.float32,))
        state = initial_state.transpose(-1, -2).contiguous().clone()
    o = gated_delta_rule(q, k, v, g, beta, state, None, None, cu_seqlens, use_qk_l2norm_in_kernel)
    return o.transpose(1, 2) if head_first else o, state.transpose(-1, -2).contiguous(), None


def _zeros(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Zero states [N, HV, V, K]."""
    states.expect_heads(NAME, q, k, v)
    count = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return q.new_zeros((count, v.shape[2], v.shape[3], q.shape[3]), dtype=torch.float32)


def _tokens_first(head_first: bool, *given: Tensor) -> Sequence[Tensor]:
    """q, k, v, g and beta with the axis of tokens before that of heads."""
    if not isinstance(head_first, bool):
        refuse(NAME, "head_first", f"is {head_first!r}, not a bool")
    if not head_first:
        return given
    for name, x, rank in zip(("q", "k", "v", "g", "beta"), given, (4, 4, 4, 3, 3), strict=True):
        expect(NAME, name, x, rank)
    return [x.transpose(1, 2) for x in given]


gated_delta_rule.tolerance(
    {torch.float32: (2e-4, 2e-5), torch.bfloat16: (2e-2, 1e-2)},
    "sums of products of a whole chunk are taken in another order, and a small o is the difference "
    "of large ones",
)
