"""What layers keep: fields by page and fields by sequence. Pools, bytes and tables follow from it.

Fields that are kept equally long share a *page group*: one pool size, one page table. There are two
at most: pages that stay as long as their sequence, and pages of fields of which queries read a
window alone (`cairn.cache.window`). A layer may have fields in both. Fields of which queries
read few pages may lie in host memory (`PageField.selected`, `cairn.cache.frames`). State of a
sequence (`RowField`) is kept at page borders as *snapshots* so that a cached prefix can be resumed
(`cairn.cache.states`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from cairn.errors import BadConfig
from cairn.specs.kv_format import KV_FORMATS, KvFormat

BYTES = torch.uint8
"""Of records of latent attention and index keys in 8 bits."""
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
        window: slots that queries read, their own included; None: any of their sequence.
        selected: pages of a head that a query reads at most: the field lies in host memory, and
            what is read comes into frames on the device, see `cairn.cache.frames`. The first size
            of its shape is that of heads. None: it lies on the device.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    summary: bool = False
    layout: str = LINEAR
    window: int | None = None
    selected: int | None = None

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
        pieces: sizes of the parts of the first axis that ranks divide each by itself; empty: the
            axis is one part.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[int, ...] = ()

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
    """

    pages: tuple[PageField, ...] = ()
    rows: tuple[RowField, ...] = ()

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
        kv: keys and values in fewer bits, see `cairn.ops.cache.quantized`; None: they are not
            quantized.
        small_records: records of latent attention and index keys in 8 bits (fp8_ds).
        index_layout: how index keys in 8 bits lie in a page: what reads them fastest on a device.
        in_host: keys and values of which queries select pages lie in host memory.
    """

    page_size: int
    dtype: torch.dtype
    kv: KvFormat | None = None
    small_records: bool = False
    index_layout: str = LINEAR
    in_host: bool = False

    def keys_and_values(self, num_kv_heads: int, head_dim: int) -> tuple[PageField, PageField]:
        """Fields `k` and `v`, a page [h_kv, S, d], or the bytes of `kv` in the place of d.

        Raises:
            BadConfig: for a format of latent attention, or heads that the format does not hold.
        """
        if self.small_records:
            raise BadConfig(
                "kv_cache_dtype is fp8_ds, a format of latent attention's records, but this model "
                "keeps keys and values of heads",
                f"Use --kv-cache-dtype {' or '.join(KV_FORMATS)}, or auto",
            )
        if self.kv is None:
            width, dtype = head_dim, self.dtype
        elif self.kv.holds(head_dim):
            width, dtype = self.kv.slot_bytes(head_dim), getattr(torch, self.kv.dtype)
        else:
            raise BadConfig(
                f"kv_cache_dtype is {self.kv.name}, but heads of {head_dim} numbers are not whole "
                f"blocks of {self.kv.block or 2}",
                "Use --kv-cache-dtype auto",
            )
        shape = num_kv_heads, self.page_size, width
        return PageField("k", shape, dtype), PageField("v", shape, dtype)


@dataclass(frozen=True, slots=True)
class PageGroup:
    """Fields that are kept equally long.

    Attributes:
        layers: numbers of the layers that have such fields.
        page_bytes: bytes of a page over all of them, on the device.
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
        group_of: by layer, the group of each of its page fields, by their names.
        row_bytes: bytes of one sequence's state over all layers.
        host_bytes: bytes of a page in host memory, over all layers.
        selected: pages of a head that a query reads of it at most; 0: there is nothing.
    """

    def __init__(self, layers: Sequence[LayerSchema], page_size: int) -> None:
        self.layers = tuple(layers)
        self.page_size = page_size
        self.row_bytes = sum(layer.row_bytes for layer in layers)
        fields = [entry for layer in layers for entry in layer.pages]
        in_host = [entry for entry in fields if entry.selected is not None]
        self.host_bytes = sum(entry.nbytes for entry in in_host)
        self.selected = max((entry.selected or 0 for entry in in_host), default=0)
        # If every field has a window, their pages are kept: the prefix cache needs pages to hold.
        apart = any(entry.window is None for entry in fields)
        self.group_of = tuple(
            {entry.name: int(apart and entry.window is not None) for entry in layer.pages}
            for layer in layers
        )
        # A group even without layers: the prefix tree identifies prefixes by pages.
        groups = [self._group(0)]
        windows = [entry.window for entry in fields if entry.window is not None]
        if apart and windows:
            groups.append(replace(self._group(1), reach=-((1 - max(windows)) // page_size)))
        self.groups = tuple(groups)

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

    def _group(self, number: int) -> PageGroup:
        """A group without its reach."""
        layers, count = [], 0
        for i, (layer, groups) in enumerate(zip(self.layers, self.group_of, strict=True)):
            own = [entry for entry in layer.pages if groups[entry.name] == number]
            layers += [i] if own else []
            count += sum(entry.nbytes for entry in own if entry.selected is None)
        return PageGroup(tuple(layers), count)
