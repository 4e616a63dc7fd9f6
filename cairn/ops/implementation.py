"""One way to compute an op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cairn.ops.call import Call

REFERENCE = "reference"
"""Name of an op's definition, which is one."""


@dataclass(frozen=True)
class Implementation:
    """One way to compute an op, and what it accepts.

    Attributes:
        name: unique within the op.
        run: computes a bound call.
        bind: makes a bound call of arguments.
        devices: device types it runs on.
        dtypes: dtypes accepted for the first floating-point tensor argument; None: any.
        when: called with the bound call; False refuses it (by shape). None: always.
        missing: why it cannot run on this machine, whatever the arguments; empty: it can.
        replayed: eager calls on CUDA tensors repeat the launches of earlier ones (launch_cache).
    """

    name: str
    run: Callable[[Call], Any]
    bind: Callable[..., Call]
    devices: tuple[str, ...]
    dtypes: Sequence[torch.dtype] | None = None
    when: Callable[[Call], bool] | None = None
    missing: str = ""
    replayed: bool = False

    @property
    def conditional(self) -> bool:
        """Whether the choice needs a look at the arguments beyond their device."""
        return self.dtypes is not None or self.when is not None

    def accepts(self, call: Call) -> bool:
        """Whether dtype and `when` accept a call (the device is the caller's business)."""
        if self.missing:
            return False
        if self.dtypes is not None:
            tensors = (value for value in call.astuple() if isinstance(value, Tensor))
            first = next((tensor for tensor in tensors if tensor.is_floating_point()), None)
            if first is not None and first.dtype not in self.dtypes:
                return False
        return self.when is None or self.when(call)
