"""What layers keep: fields by page and fields by sequence. Pools, bytes and tables follow from it.

Layers that keep their pages equally long share a *page group*: one pool size, one page table. There
are two at most: pages that stay as long as their sequence, and pages of layers that look at a
window alone (`cairn.cache.window`). State of a sequence (`RowField`) is kept at page borders as
*snapshots* so that a cached prefix can be resumed (`cairn.cache.states`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cairn.errors import BadConfig

BYTES = torch.uint8
"""Of quantized keys and values."""
LINEAR, PRESHUFFLED = "linear", "preshuffled"
"""Layouts of a page's numbers."""


@dataclass(frozen=True, slots=True)
class PageField:
    """A tensor of which every page holds a part.

    Attributes:
        name: unique in its layer.
        shape: of one page's part.
        dtype: of its numbers.
        summary: it sums the page up; it does not grow with the page's slots.
        layout: how the numbers of a page lie; nothing in them tells one from another.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    summary: bool = False
    layout: str = LINEAR

    @property
    def nbytes(self) -> int:
        """Bytes of one page's part."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class RowField:
    """A tensor with one entry for each running sequence, such as the state of a recurrent layer.

    Attributes:
        name: unique in its layer.
        shape: of one sequence's entry.
        dtype: of the tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one sequence's part."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LayerSchema:
    """What one layer keeps.

    Attributes:
        pages: by page.
        rows: by sequence.
        window: slots that queries look at, their own included; None: any of their sequence.
    """

    pages: tuple[PageField, ...] = ()
    rows: tuple[RowField, ...] = ()
    window: int | None = None

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return sum(entry.nbytes for entry in self.pages)

    @property
    def row_bytes(self) -> int:
        """Bytes of one sequence's state."""
        return sum(entry.nbytes for entry in self.rows)


@dataclass(frozen=True, slots=True)
class PageFormat:
    """How pages are stored.

    Attributes:
        page_size: slots in a page, S.
        dtype: of everything that is not quantized.
        quantized: keys and values in 8 bits, see `cairn.ops.cache.quantized`.
        small_records: records of latent attention and index keys in 8 bits (fp8_ds).
        index_layout: how index keys in 8 bits lie in a page: what reads them fastest on a device.
    """

    page_size: int
    dtype: torch.dtype
    quantized: bool = False
    small_records: bool = False
    index_layout: str = LINEAR

    @property
    def key_dtype(self) -> torch.dtype:
        """Of keys and values."""
        return BYTES if self.quantized else self.dtype

    def keys_and_values(self, num_kv_heads: int, head_dim: int) -> tuple[PageField, PageField]:
        """Fields `k` and `v`, a page [h_kv, S, d], or d + 1 bytes where they are quantized.

        Raises:
            BadConfig: for a format of latent attention.
        """
        if self.small_records:
            raise BadConfig(
                "kv_cache_dtype is fp8_ds, a format of latent attention's records, but this model "
                "keeps keys and values of heads",
                "Use --kv-cache-dtype fp8_e4m3, or auto",
            )
        shape = num_kv_heads, self.page_size, head_dim + self.quantized
        return PageField("k", shape, self.key_dtype), PageField("v", shape, self.key_dtype)


@dataclass(frozen=True, slots=True)
class PageGroup:
    """Layers whose pages are kept equally long.

    Attributes:
        layers: their numbers.
        page_bytes: bytes of a page over all of them.
        reach: pages before its own that a query touches at most; None: all of its sequence.
    """

    layers: tuple[int, ...]
    page_bytes: int
    reach: int | None = None


class CacheSchema:
    """What all layers of a model keep.

    Args:
        layers: one entry a layer.
        page_size: slots in a page.

    Attributes:
        groups: the page groups, at least one; one with `reach` comes behind one without.
        group_of: by layer, the index of its group; None for a layer without pages.
        row_bytes: bytes of one sequence's state over all layers.
    """

    def __init__(self, layers: Sequence[LayerSchema], page_size: int) -> None:
        self.layers = tuple(layers)
        self.page_size = page_size
        self.row_bytes = sum(layer.row_bytes for layer in layers)
        paged = [i for i, layer in enumerate(layers) if layer.pages]
        whole = [i for i in paged if layers[i].window is None]
        # If every layer has a window, their pages are kept: the prefix cache needs pages to hold.
        windowed = [i for i in paged if i not in whole] if whole else []
        first = whole or paged
        # A group even without layers: the prefix tree identifies prefixes by pages.
        groups = [PageGroup(tuple(first), self._bytes(first))]
        if windowed:
            widest = max(layers[i].window or 1 for i in windowed)
            reach = -((1 - widest) // page_size)
            groups.append(PageGroup(tuple(windowed), self._bytes(windowed), reach))
        self.groups = tuple(groups)
        own: dict[int, int] = {i: number for number, g in enumerate(groups) for i in g.layers}
        self.group_of = tuple(own.get(i) for i in range(len(layers)))

    @property
    def reach(self) -> int | None:
        """Of the group of windowed layers; None without one."""
        return self.groups[-1].reach

    @property
    def has_rows(self) -> bool:
        """Some layer keeps state of a sequence."""
        return self.row_bytes > 0

    @property
    def summary_bytes(self) -> int:
        """Bytes of a page that do not grow with its slots, over all layers."""
        fields = (entry for layer in self.layers for entry in layer.pages)
        return sum(entry.nbytes for entry in fields if entry.summary)

    def _bytes(self, layers: Sequence[int]) -> int:
        return sum(self.layers[i].page_bytes for i in layers)
