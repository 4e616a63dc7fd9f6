"""Samplers of probabilities with the names and signatures of FlashInfer."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.checks import FLOATS
from cairn.ops.sampling import arguments
from cairn.ops.sampling.draw_from_probs import draw_from_probs


@draw_from_probs.front
def sampling_from_probs(
    probs: Tensor,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
) -> Tensor:
    """Sample one token per row of probabilities.

    A uniform number u is drawn for each output. The token is the first, in vocabulary order, at
    which the cumulative sum exceeds u times the sum of the row.

    Args:
        probs: [B, V] float32 (or half precision, taken as float32) >= 0, of any sum.
        indices: [N] int32 or int64, the row that each output is drawn from; None: every row once.
        deterministic: ignored, draws always are.
        generator: where the uniform numbers come from; None: the device's own.
        check_nan: refuse probabilities with NaN; waits for the device.
    Returns:
        [N] int32; -1 for a row whose mass is zero, infinite or NaN.
    Raises:
        BadArgument: for another shape, dtype or device, or NaN if asked to look for it; on the CPU
            for an index of no row.
    """
    name = "sampling_from_probs"
    probs = _checked(name, probs, check_nan)
    uniform = arguments.drawn_uniforms(name, probs, indices, generator)
    return draw_from_probs(probs, uniform, indices=indices)


@draw_from_probs.front
def top_p_sampling_from_probs(
    probs: Tensor,
    top_p: Tensor | float,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
) -> Tensor:
    """Sample one token per row after the filter of top_p_renorm_probs; see sampling_from_probs.

    Args:
        probs: [B, V] float32 (or half precision, taken as float32), rows that sum to 1.
        top_p: a number, or [B] of them; with N != B `indices` also [N], of the outputs.
        indices: [N] int32 or int64, the row that each output is drawn from; None: every row once.
        deterministic: ignored, draws always are.
        generator: where the uniform numbers come from; None: the device's own.
        check_nan: refuse probabilities with NaN; waits for the device.
    Returns:
        [N] int32; -1 for a row whose mass is zero, infinite or NaN.
    Raises:
        BadArgument: for another shape, dtype or device, or NaN if asked to look for it; on the CPU
            for an index of no row.
    """
    name = "top_p_sampling_from_probs"
    probs = _checked(name, probs, check_nan)
    probs, indices = arguments.rows_of_outputs(name, probs, indices, top_p)
    p = arguments.shares(name, "top_p", top_p, probs)
    uniform = arguments.drawn_uniforms(name, probs, indices, generator)
    return draw_from_probs(probs, uniform, top_p=p, indices=indices)


@draw_from_probs.front
def min_p_sampling_from_probs(
    probs: Tensor,
    min_p: Tensor | float,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
) -> Tensor:
    """Sample one token per row from those with at least min_p times the largest probability; see
    sampling_from_probs.

    Args:
        probs: [B, V] float32 (or half precision, taken as float32) >= 0.
        min_p: a number, or [B] of them, in [0, 1]; with N != B `indices` also [N], of the
            outputs.
        indices: [N] int32 or int64, the row that each output is drawn from; None: every row once.
        deterministic: ignored, draws always are.
        generator: where the uniform numbers come from; None: the device's own.
        check_nan: refuse probabilities with NaN; waits for the device.
    Returns:
        [N] int32; -1 for a row whose mass is zero, infinite or NaN.
    Raises:
        BadArgument: for another shape, dtype or device, or NaN if asked to look for it; on the CPU
            for an index of no row.
    """
    name = "min_p_sampling_from_probs"
    probs = _checked(name, probs, check_nan)
    probs, indices = arguments.rows_of_outputs(name, probs, indices, min_p)
    p = arguments.shares(name, "min_p", min_p, probs)
    uniform = arguments.drawn_uniforms(name, probs, indices, generator)
    return draw_from_probs(probs, uniform, min_p=p, indices=indices)


@draw_from_probs.front
def top_k_top_p_sampling_from_probs(
    probs: Tensor,
    top_k: Tensor | int,
    top_p: Tensor | float,
    indices: Tensor | None = None,
    filter_apply_order: str = "top_k_first",
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
) -> Tensor:
    """Sample one token per row after top-k and top-p; see sampling_from_probs.

    Args:
        probs: [B, V] float32 (or half precision, taken as float32), rows that sum to 1.
        top_k: a number, or [B] int32 or int64, as in top_k_renorm_probs; with N != B `indices` also
            [N], of the outputs, as is top_p then.
        top_p: a number, or [B] of them, as in top_p_renorm_probs.
        filter_apply_order: "top_k_first": top-p of what top-k left, divided by its sum; "joint":
            both of the original probabilities.
        indices: [N] int32 or int64, the row that each output is drawn from; None: every row once.
        deterministic: ignored, draws always are.
        generator: where the uniform numbers come from; None: the device's own.
        check_nan: refuse probabilities with NaN; waits for the device.
    Returns:
        [N] int32; -1 for a row whose mass is zero, infinite or NaN.
    Raises:
        BadArgument: for another shape, dtype or device, or NaN if asked to look for it; on the CPU
            for an index of no row.
    """
    name = "top_k_top_p_sampling_from_probs"
    joint = arguments.check_order(name, filter_apply_order)
    probs = _checked(name, probs, check_nan)
    probs, indices = arguments.rows_of_outputs(name, probs, indices, top_k, top_p)
    k = arguments.counts(name, "top_k", top_k, probs)
    p = arguments.shares(name, "top_p", top_p, probs)
    uniform = arguments.drawn_uniforms(name, probs, indices, generator)
    return draw_from_probs(probs, uniform, k, p, None, indices, joint)


def _checked(name: str, probs: Tensor, check_nan: bool) -> Tensor:
    """Check probabilities and convert them to float32."""
    arguments.check_rows(name, "probs", probs, FLOATS)
    if check_nan:
        arguments.refuse_nan(name, "probs", probs)
    return probs.float()
