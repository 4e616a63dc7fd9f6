"""Streams in CUDA's green contexts, each with multiprocessors of its own."""

from __future__ import annotations

from typing import Any

import torch

from cairn.errors import BadConfig
from cairn.ops.checks import check_min, refuse

_kept: list[Any] = []
"""Contexts live as long as the process: their streams do not hold them."""


def create_greenctx_stream_by_value(
    SM_a: int, SM_b: int, device_id: int | None = None
) -> tuple[Any, Any]:
    """Two streams whose kernels run on at least SM_a and SM_b multiprocessors, disjoint sets.

    Args:
        SM_a, SM_b: 1 or more each; a device rounds them up to its granularity.
        device_id: of the GPU; None: the current one.
    Returns:
        Two torch.cuda.Stream.
    Raises:
        BadArgument: more multiprocessors than the device has.
        BadConfig: no CUDA device, or a PyTorch or driver without green contexts.
    """
    name = "create_greenctx_stream_by_value"
    check_min(name, "SM_a", SM_a, 1)
    check_min(name, "SM_b", SM_b, 1)
    there = get_sm_available(device_id)
    if SM_a + SM_b > there:
        refuse(name, "SM_b", f"is {SM_b} beside {SM_a}, the device has {there} multiprocessors")
    try:
        from torch.cuda.green_contexts import GreenContext
    except ImportError:
        raise BadConfig(
            f"{name}: this PyTorch has no green contexts", "Use 2.10 or newer"
        ) from None
    try:
        contexts: list[Any] = [
            GreenContext.create(num_sms=n, device_id=device_id) for n in (SM_a, SM_b)
        ]
        streams = [context.Stream() for context in contexts]
    except (RuntimeError, AttributeError) as error:
        raise BadConfig(f"{name}: no green contexts here: {error}", "Update the driver") from None
    _kept.extend(contexts)
    return streams[0], streams[1]


def get_sm_available(device_id: int | None = None) -> int:
    """Multiprocessors of a GPU.

    Args:
        device_id: of the GPU; None: the current one.
    Raises:
        BadConfig: no CUDA device.
    """
    if not torch.cuda.is_available():
        raise BadConfig("get_sm_available: no CUDA device is here", "Run on a GPU")
    device = torch.cuda.current_device() if device_id is None else device_id
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
