"""Positions and token ids of a step, and attention outputs of requests without keys."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, INDICES, expect, on_host, refuse
from cairn.ops.elementwise.kernels import clamp_kernel, resolve_kernel, zero_rows_kernel
from cairn.ops.registry import op

BLOCK = 512


@op
def clamp_position(seq_lens: Tensor) -> Tensor:
    """max(seq_lens - 1, 0): the position of each sequence's last token.

    Args:
        seq_lens: [...] int32 or int64.
    Returns:
        The same shape and dtype, contiguous.
    Raises:
        BadArgument: for another dtype.
    """
    return (seq_lens - 1).clamp_min(0).contiguous()


@clamp_position.check
def _(call: Call) -> None:
    expect("clamp_position", "seq_lens", call.seq_lens, dtypes=INDICES)


@clamp_position.implementation(
    "triton", devices=gpu.DEVICES, when=lambda call: call.seq_lens.is_contiguous(), replayed=True
)
def _(call: Call) -> Tensor:
    out = gpu.empty(call.seq_lens.shape, call.seq_lens.dtype, call.seq_lens.device)
    count = call.seq_lens.numel()
    if count:
        clamp_kernel[(-(-count // BLOCK),)](
            lengths=call.seq_lens,
            out=out,
            count=count,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return out


@op(mutates=("input_ids",))
def resolve_future_token_ids(input_ids: Tensor, future_map: Tensor) -> None:
    """input_ids < 0 become future_map[-input_ids], in place: tokens that were not yet sampled when
    the step was scheduled.

    Args:
        input_ids: [T] int32 or int64, changed; at least 1 - n.
        future_map: [n] of the same dtype.
    Raises:
        BadArgument: for another shape, dtype or device, and on the CPU for less than 1 - n.
    """
    if future_map.numel():
        known = future_map[(-input_ids).clamp_min(0).long()]
        input_ids.copy_(torch.where(input_ids < 0, known, input_ids))


@resolve_future_token_ids.check
def _(call: Call) -> None:
    name = "resolve_future_token_ids"
    expect(name, "input_ids", call.input_ids, (None,), INDICES)
    expect(
        name, "future_map", call.future_map, (None,), (call.input_ids.dtype,), like=call.input_ids
    )
    if on_host(call.input_ids) and on_host(call.future_map):
        least, end = int(call.input_ids.min()), len(call.future_map)
        if least <= -end:
            said = f"holds {least}, not numbers from {1 - end} on: `future_map` has {end} of them"
            refuse(name, "input_ids", said)


@resolve_future_token_ids.implementation(
    "triton",
    devices=gpu.DEVICES,
    when=lambda call: call.input_ids.is_contiguous() and call.future_map.is_contiguous(),
    replayed=True,
)
def _(call: Call) -> None:
    count = call.input_ids.numel()
    if count and call.future_map.numel():
        resolve_kernel[(-(-count // BLOCK),)](
            ids=call.input_ids,
            future=call.future_map,
            count=count,
            BLOCK=BLOCK,
            num_warps=4,
        )


@op(mutates=("out", "lse"))
def fixup_zero_kv_rows(
    out: Tensor, lse: Tensor, kv_lens: Tensor, cum_seq_lens: Tensor, max_seq_len: int
) -> None:
    """Tokens of requests that have no keys: out becomes 0 and lse -inf, also where they were NaN.

    Args:
        out: [T, H, d] float32, bfloat16 or float16, changed; tokens may be strided.
        lse: [T, H] float32, changed.
        kv_lens: [B] int32 or int64, keys of each request.
        cum_seq_lens: [B + 1] int32 or int64, first token of each request, and the end.
        max_seq_len: tokens of the longest request.
    Raises:
        BadArgument: for another shape, dtype or device.
    """
    token = torch.arange(out.shape[0], device=out.device)
    request = torch.searchsorted(cum_seq_lens[1:].contiguous().long(), token, right=True)
    padded = torch.nn.functional.pad(kv_lens, (0, 1), value=1)
    empty = (padded[request] == 0) & (token >= cum_seq_lens[0])
    out.masked_fill_(empty[:, None, None], 0)
    lse.masked_fill_(empty[:, None], -torch.inf)


@fixup_zero_kv_rows.check
def _(call: Call) -> None:
    name = "fixup_zero_kv_rows"
    expect(name, "out", call.out, (None, None, None), FLOATS)
    expect(name, "lse", call.lse, call.out.shape[:2], (torch.float32,), like=call.out)
    expect(name, "kv_lens", call.kv_lens, (None,), INDICES, like=call.out)
    expect(
        name, "cum_seq_lens", call.cum_seq_lens, (len(call.kv_lens) + 1,), INDICES, like=call.out
    )
    if call.max_seq_len < 0:
        refuse(name, "max_seq_len", f"is {call.max_seq_len}")


def _dense(call: Call) -> bool:
    rows = call.out[:1].is_contiguous() and call.lse.stride(1) == 1
    few = call.kv_lens.numel() <= gpu.MAX_GRID_YZ
    return rows and few and call.kv_lens.is_contiguous() and call.cum_seq_lens.is_contiguous()


@fixup_zero_kv_rows.implementation("triton", devices=gpu.DEVICES, when=_dense, replayed=True)
def _(call: Call) -> None:
    requests, heads = call.kv_lens.numel(), call.out.shape[1]
    if call.out.numel() and requests and call.max_seq_len:
        zero_rows_kernel[(call.max_seq_len, requests)](
            out=call.out,
            lse=call.lse,
            kv_lens=call.kv_lens,
            first=call.cum_seq_lens,
            out_stride=call.out.stride(0),
            lse_stride=call.lse.stride(0),
            width=heads * call.out.shape[2],
            heads=heads,
            BLOCK=1024,
            HEADS=gpu.next_power_of_2(heads),
            num_warps=4,
        )
