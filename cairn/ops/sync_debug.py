"""CAIRN_SYNC_OPS=1, a debugging mode: the host synchronizes with the device after every op.

CUDA reports an error of a kernel at the next synchronization, usually in a later op. In this mode
the error names the op that caused it, and ops check the values of index tensors on the device as
they do on the host. Steps are several times slower. Ops that are captured into a CUDA graph do not
synchronize.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cairn.errors import CairnError

VARIABLE = "CAIRN_SYNC_OPS"


class _Mode:
    """Whether the mode is on."""

    enabled = os.environ.get(VARIABLE) == "1"


mode = _Mode()


def synchronizes(device: torch.device) -> bool:
    """Whether ops on a device synchronize now."""
    if not mode.enabled or device.type != "cuda":
        return False
    return not torch.cuda.is_current_stream_capturing()


def run_and_synchronize(
    op: str, key: Any, run: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Call run(args, kwargs), then synchronize with the device of the tensor `key`.

    Raises:
        CairnError: the op failed on the device.
    """
    result = run(args, kwargs)
    if synchronizes(key.device):
        try:
            torch.cuda.synchronize(key.device)
        except Exception as error:
            raise CairnError(f"op {op} failed on {key.device}: {error}") from error
    return result
