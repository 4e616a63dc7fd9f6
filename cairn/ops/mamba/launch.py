"""Launches of the kernels of the convolution and of the gated delta rule."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.mamba import tuning
from cairn.ops.mamba.kernels.chunks import carry_kernel, chunk_kernel, chunk_table_kernel
from cairn.ops.mamba.kernels.conv import conv_sequences_kernel, conv_tokens_kernel
from cairn.ops.mamba.kernels.recurrent import recurrent_kernel
from cairn.ops.mamba.recurrence import CHUNK
from cairn.ops.pdl import uses_pdl

MAX_SEQUENCES = 1 << 12
"""Most sequences of a call: every program of the chunked rule searches all starts."""
WIDEST = 256
"""Largest K of a state [V, K]: a program holds whole rows."""


@dataclass(frozen=True, slots=True)
class Sequences:
    """Sequences concatenated in one tensor, and their states.

    Attributes:
        count: number of sequences.
        length: tokens of each where `starts` is None.
        starts: [count + 1] integers, index of each first token, and the end.
        slots: [count] integers, slots of the initial states; None: slot n for sequence n.
        stored: [count] integers, slots of the final states; None: `slots`.
        has_initial_state: [count] bool; False: the sequence starts from zeros.
        first: [count] integers, position of a sequence's first token; chunks start at positions
            that are multiples of CHUNK.
    """

    count: int
    length: int
    starts: Tensor | None = None
    slots: Tensor | None = None
    stored: Tensor | None = None
    has_initial_state: Tensor | None = None
    first: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """Tokens of the gated delta rule.

    Attributes:
        q, k: [T, H, K].
        v: [T, HV, V].
        a, b: [T, HV] or, a decay for each column, a [T, HV, K].
        a_log, dt_bias: [HV], or dt_bias [HV, K]; None: a is the log decay and b the strength
            already.
        scale: of queries.
        normalised: whether queries and keys are divided by their l2 norms.
        beta, threshold: of softplus.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    a_log: Tensor | None
    dt_bias: Tensor | None
    scale: float
    normalised: bool
    beta: float = 1.0
    threshold: float = 20.0


def in_order(x: Tensor, batches: int = 2) -> Tensor:
    """x with its first `batches` axes flattened, and its last axis contiguous."""
    x = x.flatten(0, batches - 1) if batches > 1 else x
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


@dataclass(frozen=True, slots=True)
class Convolution:
    """The depthwise convolution of inputs [channels, tokens].

    Attributes:
        weight: [D, W].
        bias: [D], or None.
        silu: whether silu is applied to outputs.
        skipped: slot of padding sequences, whose inputs are returned unchanged; None: no padding.
    """

    weight: Tensor
    bias: Tensor | None
    silu: bool
    skipped: int | None = None


def convolve(x: Tensor, by: Convolution, states: Tensor | None, of: Sequences, out: Tensor) -> None:
    """Convolve x [D, T] into `out` [D, T], which must not overlap x; states are not changed. Fast
    if the channels of a token are contiguous."""
    channels, tokens = x.shape
    if not tokens or not channels:
        return
    block, wide = tuning.CONV_TOKENS, min(tuning.CONV_CHANNELS, gpu.next_power_of_2(channels))
    parts = -(-channels // wide)
    strides = (0, 0) if states is None else states.stride()
    conv_tokens_kernel[(-(-tokens // block) * parts,)](
        x=x,
        weight=by.weight,
        bias=by.bias,
        states=states,
        starts=of.starts,
        slots=of.slots,
        has_initial_state=of.has_initial_state,
        out=out,
        tokens=tokens,
        channels=channels,
        count=of.count,
        length=max(1, of.length),
        x_token=x.stride(1),
        x_channel=x.stride(0),
        out_token=out.stride(1),
        out_channel=out.stride(0),
        weight_channel=by.weight.stride(0),
        weight_tap=by.weight.stride(1),
        state_stride=strides[0],
        state_channel=strides[1],
        SIZE=0 if states is None else states.shape[2],
        WIDTH=by.weight.shape[1],
        SKIPPED=by.skipped,
        SILU=by.silu,
        STEPS=max(1, of.count.bit_length()),
        TOKENS=block,
        CHANNELS=wide,
        PROGRAMS=parts,
        num_warps=tuning.CONV_WARPS,
    )


def convolve_each(
    x: Tensor,
    by: Convolution,
    states: Tensor,
    of: Sequences,
    out: Tensor | None,
    *,
    ring: Tensor | None = None,
    tokens: int = 0,
) -> None:
    """Convolve each sequence and update its state.

    Args:
        x: [D, T], or [B, D, L] for sequences of equal length.
        by: the convolution.
        states: [slots, D, W - 1], changed.
        of: the sequences.
        out: of x's shape, may be x; None: only states are updated.
        ring: [count] integers, tokens before these, of states that are ring buffers.
        tokens: T; outputs after the last sequence become 0.
    """
    channels, convolved = x.shape[-2], out is not None
    if not of.count or not channels:
        return
    out = x if out is None else out
    wide = min(tuning.CONV_EACH, gpu.next_power_of_2(channels))
    parts = -(-channels // wide)
    conv_sequences_kernel[(of.count * parts,)](
        x=x,
        weight=by.weight,
        bias=by.bias,
        states=states,
        starts=of.starts,
        slots=of.slots,
        stored=of.stored,
        has_initial_state=of.has_initial_state,
        ring=ring,
        out=out,
        channels=channels,
        tokens=tokens,
        length=of.length,
        x_token=x.stride(-1),
        x_channel=x.stride(-2),
        x_batch=x.stride(0),
        out_token=out.stride(-1),
        out_channel=out.stride(-2),
        out_batch=out.stride(0),
        weight_channel=by.weight.stride(0),
        weight_tap=by.weight.stride(1),
        state_stride=states.stride(0),
        state_channel=states.stride(1),
        SIZE=states.shape[2],
        WIDTH=by.weight.shape[1],
        SKIPPED=by.skipped,
        SILU=by.silu,
        CONVOLVE=convolved,
        UPDATE=states.shape[2] > 0,
        COLUMNS=gpu.next_power_of_2(max(1, states.shape[2])),
        CHANNELS=wide,
        PROGRAMS=parts,
        PDL=uses_pdl(x.device, of.count * parts, tuning.CONV_EACH_WARPS),
        num_warps=tuning.CONV_EACH_WARPS,
    )


def run_tokens(
    rule: Rule, pool: Tensor | None, of: Sequences, out: Tensor, update: bool = True,
    buffer: Tensor | None = None, rows: Tensor | None = None, parents: Tensor | None = None,
    tokens: int = 0,
) -> None:  # fmt: skip
    """The rule token by token: outputs [T, HV, V]; see `recurrent_kernel`."""
    heads, width, high = rule.v.shape[1], rule.k.shape[2], rule.v.shape[2]
    if not of.count:
        return
    block, warps = tuning.recurrent(high, gpu.next_power_of_2(width))
    programs = of.count * heads * -(-high // block)
    trail = None
    if parents is not None:
        shape = (of.count, parents.shape[1], heads, high, width)
        trail = gpu.empty(shape, torch.float32, out.device)
    recurrent_kernel[(programs,)](
        q=rule.q,
        k=rule.k,
        v=rule.v,
        a=rule.a,
        b=rule.b,
        a_log=rule.a_log,
        dt_bias=rule.dt_bias,
        out=out,
        pool=pool,
        slots=of.slots,
        stored=of.stored,
        has_initial_state=of.has_initial_state,
        starts=of.starts,
        first=of.first,
        buffer=buffer,
        rows=rows,
        parents=parents,
        trail=trail,
        tokens=tokens,
        length=of.length,
        scale=rule.scale,
        beta=rule.beta,
        threshold=rule.threshold,
        q_token=rule.q.stride(0),
        q_head=rule.q.stride(1),
        k_token=rule.k.stride(0),
        k_head=rule.k.stride(1),
        v_token=rule.v.stride(0),
        v_head=rule.v.stride(1),
        a_token=rule.a.stride(0),
        a_head=rule.a.stride(1),
        b_token=rule.b.stride(0),
        buffer_stride=0 if buffer is None else buffer.stride(0),
        parents_stride=0 if parents is None else parents.stride(0),
        trail_stride=0 if trail is None else trail.stride(0),
        HEADS=heads,
        EACH=heads // rule.k.shape[1],
        K=width,
        V=high,
        BLOCK_K=gpu.next_power_of_2(width),
        BLOCK_V=block,
        NORMALISED=rule.normalised,
        BY_COLUMN=rule.a.dim() == 3,
        UPDATE=update and pool is not None,
        PDL=uses_pdl(out.device, programs, warps),
        num_warps=warps,
    )


def _chunk_table(of: Sequences, most: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The table and the number of each sequence's first chunk, from `chunk_table_kernel`."""
    table = gpu.empty((most, 4), torch.int32, device)
    before = gpu.empty((of.count,), torch.int32, device)
    chunk_table_kernel[(of.count,)](
        starts=of.starts,
        first=of.first,
        table=table,
        before=before,
        count=of.count,
        length=of.length,
        most=most,
        COUNT=gpu.next_power_of_2(of.count),
        BLOCK=tuning.TABLE,
    )
    return table, before


def run_chunks(
    rule: Rule, pool: Tensor, of: Sequences, out: Tensor, few_apart: bool = False
) -> None:
    """The rule in chunks; see `kernels.chunks`. Outputs after the last sequence become 0."""
    tokens, heads, high = rule.v.shape
    width = rule.k.shape[2]
    # Each sequence may have an incomplete first and last chunk.
    most = -(-tokens // CHUNK) + min(of.count * (1 if of.first is None else 2), tokens)
    dtype, device = rule.v.dtype, out.device
    table, before = _chunk_table(of, most, device)
    weights, scores = (gpu.empty((tokens, heads, CHUNK), dtype, device) for _ in range(2))
    factors = gpu.empty((most, heads, 4, CHUNK), torch.float32, device)
    decays = gpu.empty((most, heads), torch.float32, device)
    block, warps, stages = tuning.carry(of.count * heads, high)
    common = {
        "q": rule.q,
        "k": rule.k,
        "starts": of.starts,
        "stored": of.slots if of.stored is None else of.stored,
        "weights": weights,
        "scores": scores,
        "factors": factors,
        "decays": decays,
        "out": out,
        "length": of.length,
        "q_token": rule.q.stride(0),
        "q_head": rule.q.stride(1),
        "k_token": rule.k.stride(0),
        "k_head": rule.k.stride(1),
        "HEADS": heads,
        "EACH": heads // rule.k.shape[1],
        "K": width,
        "V": high,
        "BLOCK_K": max(16, gpu.next_power_of_2(width)),
        "FEW_APART": few_apart,
    }
    if tokens:
        chunk_kernel[(most, heads)](
            **common,
            a=rule.a,
            b=rule.b,
            a_log=rule.a_log,
            dt_bias=rule.dt_bias,
            table=table,
            tokens=tokens,
            count=of.count,
            scale=rule.scale,
            beta=rule.beta,
            threshold=rule.threshold,
            a_token=rule.a.stride(0),
            b_token=rule.b.stride(0),
            BLOCK_V=gpu.next_power_of_2(high),
            NORMALISED=rule.normalised,
            RAW=rule.a_log is not None,
            num_warps=tuning.CHUNK_WARPS,
        )
    carry_kernel[(heads * -(-high // block), of.count)](
        **common,
        v=rule.v,
        before=before,
        first=of.first,
        pool=pool,
        slots=of.slots,
        has_initial_state=of.has_initial_state,
        v_token=rule.v.stride(0),
        v_head=rule.v.stride(1),
        BLOCK_V=block,
        STAGES=stages,
        num_warps=warps,
    )
