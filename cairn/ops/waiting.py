"""CAIRN_SYNC_OPS=1, for debugging: the host waits behind every op.

A device reports what went wrong in a kernel when somebody next waits for it, which is mostly in
another op. In this mode it is said of the op that did it, and ops look at what indices hold on a
device as they do on the host. Steps are several times slower; graphs are captured without it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cairn.errors import CairnError

VARIABLE = "CAIRN_SYNC_OPS"


class _Waiting:
    """Whether the host waits."""

    enabled = os.environ.get(VARIABLE) == "1"


waiting = _Waiting()


def waits(device: torch.device) -> bool:
    """Whether the host waits for ops on a device now."""
    if not waiting.enabled or device.type != "cuda":
        return False
    return not torch.cuda.is_current_stream_capturing()


def run_and_wait(
    op: str, key: Any, run: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """run(args, kwargs), and wait for what it has queued on the device of the tensor `key`.

    Raises:
        CairnError: it failed on the device.
    """
    result = run(args, kwargs)
    if waits(key.device):
        try:
            torch.cuda.synchronize(key.device)
        except Exception as error:
            raise CairnError(f"op {op} failed on {key.device}: {error}") from error
    return result
