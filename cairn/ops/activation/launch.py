"""What the activations share: definitions around a formula, looks at arguments, the launch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.activation.kernels import activation_kernel
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, INDICES, expect, refuse
from cairn.ops.pdl import uses_pdl
from cairn.ops.registry import Op

BLOCK, WARPS = 1024, 4
"""Elements and warps of a program of a gated activation."""
PLAIN_BLOCK, PLAIN_WARPS = 2048, 4
"""The same of one without a gate."""
PDL_BLOCK, PDL_WARPS = 256, 4
"""The same when launched with PDL."""


def in_rows(call: Call) -> bool:
    """Whether the elements of each row are contiguous."""
    return bool(call.input.stride(-1) == 1)


def gated(
    act: Callable[[Tensor], Tensor],
    input: Tensor,
    out: Tensor | None,
    expert_ids: Tensor | None,
    expert_step: int,
) -> Tensor:
    """act(input[..., :d]) * input[..., d:], of all rows or of those that have an expert."""
    gate, up = input.float().chunk(2, dim=-1)
    return of_experts((act(gate) * up).to(input.dtype), out, expert_ids, expert_step)


def of_experts(
    result: Tensor, out: Tensor | None, expert_ids: Tensor | None, expert_step: int
) -> Tensor:
    """result [..., d] where rows have an expert, elsewhere what is in out; None: 0."""
    if expert_ids is None:
        return result
    written = (expert_ids != -1).repeat_interleave(expert_step)[: result[..., 0].numel()]
    before = torch.zeros_like(result) if out is None else out
    return torch.where(written.view(result.shape[:-1]).unsqueeze(-1), result, before)


def check(
    op: str,
    input: Tensor,
    out: Tensor | None,
    expert_ids: Tensor | None = None,
    expert_step: int = 1,
    *,
    gates: int = 2,
) -> None:
    """Raise BadArgument unless the arguments fit; `gates`: widths of the result in a row."""
    expect(op, "input", input, dtypes=FLOATS)
    if input.dim() == 0 or input.shape[-1] % gates:
        wanted = "[..., 2d]" if gates == 2 else "[..., d]"
        refuse(op, "input", f"has shape {list(input.shape)}, not {wanted}")
    shape = (*input.shape[:-1], input.shape[-1] // gates)
    if out is not None:
        expect(op, "out", out, shape, (input.dtype,), like=input)
    if expert_ids is not None:
        if expert_step < 1:
            refuse(op, "expert_step", f"is {expert_step}, not 1 or more")
        rows = input.shape[:-1].numel()
        expect(op, "expert_ids", expert_ids, (None,), INDICES, like=input, dense=1)
        if expert_ids.numel() * expert_step < rows:
            given = f"{expert_ids.numel()} entries for {expert_step} rows each"
            refuse(op, "expert_ids", f"has {given}, but there are {rows} rows")


def register(op: Op[..., Tensor], kind: str, gates: int = 2) -> None:
    """Register the check and the kernel of an activation; kind: as in `activated`."""

    @op.check
    def _(call: Call) -> None:
        check(op.name, call.input, call.out, *_experts(call), gates=gates)

    @op.implementation("triton", devices=gpu.DEVICES, when=in_rows, replayed=True)
    def _(call: Call) -> Tensor:
        return launch(kind, call.input, call.out, *_experts(call), gates=gates)


def _experts(call: Call) -> tuple[Tensor | None, int]:
    return getattr(call, "expert_ids", None), getattr(call, "expert_step", 1)


def launch(
    kind: str,
    input: Tensor,
    out: Tensor | None,
    expert_ids: Tensor | None,
    step: int,
    *,
    gates: int,
    limit: float = 0.0,
) -> Tensor:
    """`activation_kernel` over input [..., gates * d] with contiguous rows; limit: of
    these, 0: none."""
    width = input.shape[-1] // gates
    x = input.reshape(input.shape[:-1].numel(), gates * width)
    result = out
    if result is None or not result.is_contiguous():
        fresh = gpu.empty if expert_ids is None else gpu.zeros
        result = fresh((*input.shape[:-1], width), input.dtype, input.device)
        if out is not None and expert_ids is not None:
            result.copy_(out)
    rows = x.shape[0]
    most, warps = (BLOCK, WARPS) if gates == 2 else (PLAIN_BLOCK, PLAIN_WARPS)
    pdl = uses_pdl(x.device, rows, -(-width // PDL_BLOCK) * PDL_WARPS)
    if pdl:
        most, warps = PDL_BLOCK, PDL_WARPS
    block = min(most, gpu.next_power_of_2(max(1, width)))
    blocks = -(-width // block)
    if x.numel():
        activation_kernel[(rows * blocks,)](
            x=x,
            out=result,
            expert_ids=expert_ids,
            x_stride=x.stride(0),
            out_stride=width,
            width=width,
            step=step,
            limit=float(limit),
            BLOCKS=blocks,
            BLOCK=block,
            KIND=kind,
            GATED=gates == 2,
            CLAMPED=limit > 0,
            PDL=pdl,
            num_warps=warps,
        )
    return result
