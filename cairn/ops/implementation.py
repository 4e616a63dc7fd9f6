"""One way to compute an op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

REFERENCE = "reference"
"""Name of an op's definition, which is one."""
HANDED_ON = ["args", "kwargs"]
"""Parameters of an implementation that does not look at its arguments."""


@dataclass(frozen=True)
class Implementation:
    """One way to compute an op, and what it accepts.

    Attributes:
        name: unique within the op.
        function: same parameters as the definition, or HANDED_ON.
        devices: device types it runs on.
        dtypes: dtypes accepted for the first floating-point tensor argument; None: any.
        when: called with the op's arguments; False refuses them (by shape). None: always.
        missing: why it cannot run on this machine, whatever the arguments; empty: it can.
        replayed: eager calls on CUDA tensors make the launches of earlier ones again (replay.py).
    """

    name: str
    function: Callable[..., Any]
    devices: tuple[str, ...]
    dtypes: Sequence[torch.dtype] | None = None
    when: Callable[..., bool] | None = None
    missing: str = ""
    replayed: bool = False

    @property
    def conditional(self) -> bool:
        """Whether the choice needs a look at the arguments beyond their device."""
        return self.dtypes is not None or self.when is not None

    def accepts(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether dtype and `when` accept the arguments (the device is the caller's business)."""
        if self.missing:
            return False
        if self.dtypes is not None:
            given = [*args, *kwargs.values()]
            floating = (v for v in given if isinstance(v, Tensor) and v.is_floating_point())
            first = next(floating, None)
            if first is not None and first.dtype not in self.dtypes:
                return False
        return self.when is None or self.when(*args, **kwargs)
