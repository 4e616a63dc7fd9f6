"""The cache schema: per-page and per-sequence fields of layers, from which pools, sizes and page
tables follow.

Fields that are kept equally long share a *page group*: one pool size, one page table. There are at
most two: pages kept as long as their sequence, and pages of fields of which queries read only a
window (`cairn.cache.window`). A layer may have fields in both. Fields of which queries read few
pages may be in host memory (`PageField.selected`, `cairn.cache.frames`). State of a sequence
(`RowField`) is kept at page borders as *snapshots* so that a cached prefix can be resumed
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
"""Dtype of 8-bit records of latent attention and of 8-bit index keys."""
LINEAR, PRESHUFFLED = "linear", "preshuffled"
"""Layouts of a page's elements."""


@dataclass(frozen=True, slots=True)
class PageField:
    """A field with one entry per page.

    Attributes:
        name: unique in its layer.
        shape: shape of one page's entry.
        dtype: its dtype.
        summary: whether it is a summary of the page, whose size does not depend on the page size.
        layout: order of elements within a page, which the data does not tell.
        window: slots that queries read, including their own; None: the whole sequence.
        selected: most pages per head that a query reads: the field is in host memory, and selected
            pages are fetched into frames on the device, see `cairn.cache.frames`; the first dim of
            its shape is heads. None: the field is on the device.
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
        """Bytes of one page's entry."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class RowField:
    """A tensor with one entry for each running sequence, such as the state of a recurrent layer.

    Attributes:
        name: unique in its layer.
        shape: of one sequence's entry.
        dtype: of the tensor.
        pieces: sizes of the parts of the first axis that are sharded separately over ranks; empty:
            the axis is one part.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of one sequence's entry."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LayerSchema:
    """The cache fields of one layer.

    Attributes:
        pages: fields with an entry per page.
        rows: fields with an entry per sequence.
    """

    pages: tuple[PageField, ...] = ()
    rows: tuple[RowField, ...] = ()

    @property
    def row_bytes(self) -> int:
        """Bytes of one sequence's state."""
        return sum(entry.nbytes for entry in self.rows)


@dataclass(frozen=True, slots=True)
class PageFormat:
    """Storage format of pages.

    Attributes:
        page_size: slots in a page, S.
        dtype: dtype of everything that is not quantised.
        kv: quantised format of keys and values, see `cairn.ops.cache.quantized`; None: not
            quantised.
        small_records: whether records of latent attention and index keys have 8 bits (fp8_ds).
        index_layout: layout of 8-bit index keys in a page: the fastest one for the device.
        in_host: whether keys and values of layers that select pages are in host memory.
    """

    page_size: int
    dtype: torch.dtype
    kv: KvFormat | None = None
    small_records: bool = False
    index_layout: str = LINEAR
    in_host: bool = False

    def keys_and_values(self, num_kv_heads: int, head_dim: int) -> tuple[PageField, PageField]:
        """Fields `k` and `v` with pages [h_kv, S, d], or with bytes of the format `kv` in place of
        d.

        Raises:
            BadConfig: for a format of latent attention, or a head dim that the format does not
                support.
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
        layers: indices of the layers with such fields.
        page_bytes: bytes of a page over all these layers, on the device.
        reach: most pages before its own that a query reads; None: all of its sequence.
    """

    layers: tuple[int, ...]
    page_bytes: int
    reach: int | None = None


class CacheSchema:
    """The cache fields of all layers of a model.

    Args:
        layers: one entry per layer.
        page_size: slots in a page.

    Attributes:
        groups: the page groups, at least one; one with `reach` follows one without.
        group_of: by layer: field name -> index of its group.
        row_bytes: bytes of one sequence's state over all layers.
        host_bytes: bytes of a page in host memory, over all layers.
        selected: most pages per head that a query reads from host memory; 0: nothing is there.
    """

    def __init__(self, layers: Sequence[LayerSchema], page_size: int) -> None:
        self.layers = tuple(layers)
        self.page_size = page_size
        self.row_bytes = sum(layer.row_bytes for layer in layers)
        fields = [entry for layer in layers for entry in layer.pages]
        in_host = [entry for entry in fields if entry.selected is not None]
        self.host_bytes = sum(entry.nbytes for entry in in_host)
        self.selected = max((entry.selected or 0 for entry in in_host), default=0)
        # If every field has a window, their pages are kept for the whole sequence: the prefix cache
        # needs pages.
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
        """`reach` of the group of window layers; None without one."""
        return self.groups[-1].reach

    @property
    def has_rows(self) -> bool:
        """Whether some layer has a per-sequence state."""
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
