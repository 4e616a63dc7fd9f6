"""The device memory of the pages: keys, values and summaries of every layer, by physical page."""

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
    """

    num_kv_heads: int
    head_dim: int
    num_heads: int = 0
    summary_heads: int = 0
    own_key: bool = False
    bias: bool = False

    def __post_init__(self) -> None:
        if self.bias and self.num_heads < 1:
            raise ValueError("a summary bias needs num_heads, the number of query heads")


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

    Attributes:
        spare_page: its number, None without one.
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
    ) -> None:
        self.specs = tuple(specs)
        self.num_pages = num_pages
        self.form = form
        self.spare_page = num_pages if spare else None
        self.nbytes = (num_pages + spare) * form.bytes_per_page(specs)
        self.k: list[Tensor] = []
        self.v: list[Tensor] = []
        self.summary_key: list[Tensor | None] = []
        self.summary_bias: list[Tensor | None] = []
        try:
            for spec in self.specs:
                self._add(spec, torch.device(device))
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            raise OutOfMemory(
                f"{num_pages} pages of {form.page_size} slots need {self.nbytes} bytes on {device}",
                "Lower the number of pages",
            ) from error

    def _add(self, spec: CacheSpec, device: torch.device) -> None:
        pages = self.num_pages + (self.spare_page is not None)
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

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor of the pools."""
        yield from self.k
        yield from self.v
        for optional in (*self.summary_key, *self.summary_bias):
            if optional is not None:
                yield optional


def _is_out_of_memory(error: RuntimeError) -> bool:
    """The CPU allocator and the CUDA driver report exhaustion as a plain RuntimeError."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return any(
        sign in text
        for sign in ("out of memory", "can't allocate memory", "size calculation overflow")
    )
