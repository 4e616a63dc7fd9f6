"""FlashAttention's scheduling metadata, which these kernels do not need."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def get_scheduler_metadata(*args: Any, **kwargs: Any) -> Tensor:
    """An empty int32 tensor, for `scheduler_metadata` of `flash_attn_with_kvcache`.

    Args:
        args, kwargs: arguments of FlashAttention's function; only the device of the first tensor
            among them is used.
    """
    given = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    first = next(given, None)
    device = torch.device("cpu") if first is None else first.device
    return torch.empty(0, dtype=torch.int32, device=device)
