"""An implementation of an op, and the calls that it accepts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cairn.ops.call import Call

REFERENCE = "reference"
"""Name of the implementation that is the op's definition."""


@dataclass(frozen=True)
class Implementation:
    """An implementation of an op, and the calls that it accepts.

    Attributes:
        name: unique within the op.
        run: computes a bound call.
        bind: binds arguments to a call.
        devices: device types it runs on.
        dtypes: dtypes accepted for the first floating-point tensor argument; None: any.
        when: predicate of the bound call, for conditions on shapes; None: accepts all.
        missing: why it cannot run on this machine; empty if it can.
        replayed: eager calls on CUDA tensors replay recorded launches (launch_cache).
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
        """Whether acceptance depends on more than the device of the arguments."""
        return self.dtypes is not None or self.when is not None

    def accepts(self, call: Call) -> bool:
        """Whether dtype and `when` accept a call. The caller checks the device."""
        if self.missing:
            return False
        if self.dtypes is not None:
            tensors = (value for value in call.astuple() if isinstance(value, Tensor))
            first = next((tensor for tensor in tensors if tensor.is_floating_point()), None)
            if first is not None and first.dtype not in self.dtypes:
                return False
        return self.when is None or self.when(call)
