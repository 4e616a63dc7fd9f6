"""The device memory of the pages: keys, values and summaries of every layer, by physical page.

In a model in which only some layers see a window of the context alone, these have pages of their
own (`cairn.cache.window`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cairn.errors import OutOfMemory

BYTES = torch.uint8
"""Of quantized keys and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """What one layer stores for every page.

    Attributes:
        num_kv_heads: h_kv.
        head_dim: d.
        num_heads: h_q; only read where `bias` is set.
        summary_heads: heads of the summary key (h_q or h_kv), 0 for a layer that stores none.
        own_key: the summary is the landmark's own key, `k[:, :, -1]`. It is stored once more where
            keys are quantized and summaries are not.
        bias: a float32 bias per page and query head is stored.
        window: slots that queries look at, their own included; None: any of their sequence.
    """

    num_kv_heads: int
    head_dim: int
    num_heads: int = 0
    summary_heads: int = 0
    own_key: bool = False
    bias: bool = False
    window: int | None = None

    def __post_init__(self) -> None:
        if self.bias and self.num_heads < 1:
            raise ValueError("a summary bias needs num_heads, the number of query heads")


def windowed(specs: Sequence[CacheSpec]) -> list[bool]:
    """Which layers have pages of their own: those with a window, beside any without."""
    mixed = any(spec.window is None for spec in specs)
    return [mixed and spec.window is not None for spec in specs]


def window_reach(specs: Sequence[CacheSpec], page_size: int) -> int | None:
    """Pages before its own that a query of the layers with pages of their own touches at most; None
    where no layer has any."""
    widths = [s.window for s, own in zip(specs, windowed(specs), strict=True) if own and s.window]
    return -((1 - max(widths)) // page_size) if widths else None


@dataclass(frozen=True, slots=True)
class PageFormat:
    """How pages are stored.

    Attributes:
        page_size: slots in a page, S.
        dtype: of summaries, and of keys and values that are not quantized.
        quantized: keys and values in 8 bits, see `cairn.ops.cache.quantized`.
    """

    page_size: int
    dtype: torch.dtype
    quantized: bool = False

    @property
    def key_dtype(self) -> torch.dtype:
        """Of keys and values."""
        return BYTES if self.quantized else self.dtype

    def key_shape(self, spec: CacheSpec) -> tuple[int, int, int]:
        """Shape of one page's keys (and of its values): [h_kv, S, d], or d + 1 bytes."""
        return spec.num_kv_heads, self.page_size, spec.head_dim + self.quantized

    def summary_heads(self, spec: CacheSpec) -> int:
        """Heads of the summary key that are stored."""
        return spec.num_kv_heads if spec.own_key and self.quantized else spec.summary_heads

    def bytes_by_pool(self, specs: Sequence[CacheSpec]) -> tuple[int, int]:
        """Bytes of a page over all layers that share theirs, and over those with their own."""
        own = windowed(specs)
        shared = [spec for spec, apart in zip(specs, own, strict=True) if not apart]
        apart = [spec for spec, apart in zip(specs, own, strict=True) if apart]
        return self.bytes_per_page(shared), self.bytes_per_page(apart)

    def bytes_per_page(self, specs: Sequence[CacheSpec]) -> int:
        """Bytes that one page takes over all layers."""
        total = 0
        for spec in specs:
            total += 2 * math.prod(self.key_shape(spec)) * self.key_dtype.itemsize
            total += self.summary_heads(spec) * spec.head_dim * self.dtype.itemsize
            total += spec.num_heads * torch.float32.itemsize if spec.bias else 0
        return total


class CachePools:
    """One set of tensors per layer, allocated once and never moved.

    Memory is not initialised: whoever reads a page must have written it, and a mask must not let a
        NaN through.

    Args:
        specs: one per layer.
        num_pages: physical pages.
        form: how they are stored.
        spare: one page more that belongs to nobody, for what padding writes.
        window_pages: physical pages of the layers that have pages of their own.

    Attributes:
        spare_page: its number, None without one.
        own: by layer, whether it has pages of its own.
        k, v: per layer [pages, h_kv, S, d], or quantized.
        summary_key: per layer [pages, h_R, d], None where nothing is stored.
        summary_bias: per layer [pages, h_q] float32, None where nothing is stored.
        nbytes: size of everything.

    Raises OutOfMemory, naming the bytes asked for, when the device does not have them.
    """

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        num_pages: int,
        form: PageFormat,
        device: torch.device | str,
        spare: bool = False,
        window_pages: int = 0,
    ) -> None:
        self.specs = tuple(specs)
        self.num_pages = num_pages
        self.window_pages = window_pages
        self.form = form
        self.spare_page = num_pages if spare else None
        self.own = windowed(specs)
        if any(self.own) != (window_pages > 0):
            raise ValueError(f"{sum(self.own)} layers have pages of their own, of {window_pages}")
        shared, own = form.bytes_by_pool(specs)
        self.nbytes = (num_pages + spare) * shared + (window_pages + spare) * own
        self.k: list[Tensor] = []
        self.v: list[Tensor] = []
        self.summary_key: list[Tensor | None] = []
        self.summary_bias: list[Tensor | None] = []
        try:
            for spec, own in zip(self.specs, self.own, strict=True):
                pages = (window_pages if own else num_pages) + spare
                self._add(spec, pages, torch.device(device))
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            raise OutOfMemory(
                f"{num_pages} pages of {form.page_size} slots need {self.nbytes} bytes on {device}",
                "Lower the number of pages",
            ) from error

    def _add(self, spec: CacheSpec, pages: int, device: torch.device) -> None:
        shape = (pages, *self.form.key_shape(spec))
        for caches in (self.k, self.v):
            caches.append(torch.empty(shape, dtype=self.form.key_dtype, device=device))
        heads = self.form.summary_heads(spec)
        key = (
            torch.empty(pages, heads, spec.head_dim, dtype=self.form.dtype, device=device)
            if heads
            else None
        )
        bias = (
            torch.empty(pages, spec.num_heads, dtype=torch.float32, device=device)
            if spec.bias
            else None
        )
        self.summary_key.append(key)
        self.summary_bias.append(bias)

    def tensors(self, own: bool | None = None) -> Iterator[Tensor]:
        """Every tensor of the pools.

        Args:
            own: only those of layers that have pages of their own, or only those of others.
        """
        for caches in (self.k, self.v, self.summary_key, self.summary_bias):
            for tensor, layer_own in zip(caches, self.own, strict=True):
                if tensor is not None and own in (None, layer_own):
                    yield tensor


def _is_out_of_memory(error: RuntimeError) -> bool:
    """The CPU allocator and the CUDA driver report exhaustion as a plain RuntimeError."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return any(
        sign in text
        for sign in ("out of memory", "can't allocate memory", "size calculation overflow")
    )
