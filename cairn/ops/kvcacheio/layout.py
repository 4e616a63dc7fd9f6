"""Where the bytes of a token lie in a cache of all layers.

An item is what one token has in one layer, of keys or of values. The layouts in the public
functions' names:

* lf, layer first: a buffer of its own for every layer, token i at i * item.
* pf, page first: token i, layer L at i * dim + L * item, with dim = layers * item.
* ph, page head: [pages, heads, page_size, layers, item / heads].

lf and pf are special cases of ph: lf has one layer, and both have one head and pages of one token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Layout(NamedTuple):
    """One side of a copy.

    Attributes:
        dim: bytes of a token in all layers of a buffer.
        page_size: tokens of a page.
        heads: parts of an item that are not adjacent in memory.
    """

    dim: int
    page_size: int = 1
    heads: int = 1

    def layers(self, item: int) -> int:
        """Layers of a buffer."""
        return self.dim // item

    def view(self, buffer: Tensor, item: int) -> Tensor:
        """A buffer's bytes as [pages, heads, page_size, layers, item / heads]."""
        shape = (-1, self.heads, self.page_size, self.layers(item), item // self.heads)
        return buffer.view(-1).view(torch.uint8).view(shape)

    def steps(self, item: int, run: int) -> tuple[int, int, int, int]:
        """Bytes from page to page, token to token of a page, layer to layer, and from one run of an
        item to the next; a run is contiguous in both layouts of a copy."""
        page, parts = self.page_size * self.dim, self.heads
        layer = item // parts if self.layers(item) > 1 else 0
        return page, self.dim // parts, layer, run if parts == 1 else page // parts
