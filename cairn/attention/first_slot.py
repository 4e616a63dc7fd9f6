"""The first slot of a draft layer, which is not a key: there is no hidden state of an earlier
token.

Kernels attend over slots 0 .. s nevertheless. In the first slot the cache has a key of 0, whose
score is 0, and a value of 0; its share e^0 of the sum e^lse is removed from the kernels' results.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.attention.base import DRAFT_STATE
from cairn.cache.schema import PageField, PageFormat


def draft_fields(width: int, form: PageFormat) -> tuple[PageField, ...]:
    """Further cache fields of a draft layer: the model's hidden state of a page's last token. Empty
    for other layers, whose width is 0."""
    return (PageField(DRAFT_STATE, (width,), form.dtype, summary=True),) if width else ()


def cleared(lines: Tensor, slot: Tensor) -> Tensor:
    """Keys or values [T, ...] of a step's slots [T] int64, with zeros at first slots."""
    return lines.masked_fill((slot <= 0).view(-1, *(1,) * (lines.dim() - 1)), 0)


def without_first(o: Tensor, lse: Tensor, read: Tensor) -> Tensor:
    """Attention over the other slots; 0 where there is none.

    Args:
        o: [n, h, d], over all slots.
        lse: [n, h] float32, log of the sum of their exponentials.
        read: [n] bool, whether the first slot is among them.
    """
    share = torch.where(read[:, None], -torch.expm1(-lse), 1.0)
    return (o / share.masked_fill(share <= 0, torch.inf)[..., None]).to(o.dtype)
