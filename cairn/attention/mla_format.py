"""Cache fields of layers of latent attention."""

from __future__ import annotations

from dataclasses import dataclass

from cairn.cache.schema import BYTES, LINEAR, PRESHUFFLED, PageField, PageFormat
from cairn.errors import BadConfig
from cairn.specs.mla import MlaSpec

RECORD = "record"
INDEX_KEY = "index_key"
SCALED = 128
"""Elements of a latent that share a scale."""
TILE = 16
"""Tokens and elements of a tile of the preshuffled layout."""
LAYOUTS = (LINEAR, PRESHUFFLED)
MIN_ROTATED, MAX_ROTATED = 16, 256
"""Bounds of the dimension of keys that are rotated, a power of two."""


def record_field(spec: MlaSpec, form: PageFormat) -> PageField:
    """The field of records, in the model's dtype or in bytes: see `cairn.ops.mla_kv_store`.

    Raises:
        BadConfig: for a format that does not hold them.
    """
    if form.kv is not None:
        raise BadConfig(
            f"kv_cache_dtype is {form.kv.name}, which is not a format of latent attention's "
            "records",
            "Use --kv-cache-dtype fp8_ds, or auto",
        )
    if not form.small_records:
        return PageField(RECORD, (form.page_size, spec.record_dim), form.dtype)
    rank, rope = spec.kv_lora_rank, spec.rope_dim
    if rank % SCALED or rope % 2:
        raise BadConfig(
            f"kv_cache_dtype is fp8_ds, which holds latents in tiles of {SCALED} numbers and an "
            f"even number of rotated ones, not {rank} and {rope}",
            "Use --kv-cache-dtype auto",
        )
    return PageField(RECORD, (form.page_size, rank + 4 * (rank // SCALED) + 2 * rope), BYTES)


def index_field(dim: int, form: PageFormat) -> PageField:
    """The field of an indexer's keys, in the model's dtype or in bytes: see
    `cairn.ops.index_k_store`.

    Raises:
        BadConfig: for a format or layout that does not hold them.
    """
    if not form.small_records:
        return PageField(INDEX_KEY, (form.page_size, dim), form.dtype)
    if dim % 4:
        raise BadConfig(
            f"kv_cache_dtype is fp8_ds, but index keys have {dim} numbers, no multiple of 4",
            "Use --kv-cache-dtype auto",
        )
    if form.index_layout == PRESHUFFLED and (form.page_size % TILE or dim % TILE):
        raise BadConfig(
            f"index keys in the layout {PRESHUFFLED} lie in tiles of {TILE} tokens by {TILE} "
            f"numbers, which pages of {form.page_size} keys of {dim} do not hold",
            "Use --page-size 64",
        )
    size = form.page_size * (dim + 4)
    return PageField(INDEX_KEY, (size,), BYTES, layout=form.index_layout)


@dataclass(frozen=True, slots=True)
class IndexFormat:
    """Format of an indexer's keys in pages, an argument of the ops that read or write them.

    Attributes:
        quantized: in float8, with a power of two as the scale of each.
        preshuffled: in tiles, see `cairn.ops.index_k_store`.
        rotated: multiplied by a Hadamard matrix, so that no few outlier dimensions determine the
            scale.
    """

    quantized: bool
    preshuffled: bool
    rotated: bool

    @classmethod
    def of(cls, entry: PageField, dim: int) -> IndexFormat:
        """The format of a cache field of keys with `dim` elements.

        Raises:
            BadConfig: for a layout that no op supports.
        """
        if entry.layout not in LAYOUTS:
            raise BadConfig(
                f"index keys have the layout {entry.layout!r}", f"Known: {', '.join(LAYOUTS)}"
            )
        quantized, power = entry.dtype == BYTES, dim & (dim - 1) == 0
        rotated = quantized and power and MIN_ROTATED <= dim <= MAX_ROTATED
        return cls(quantized, entry.layout == PRESHUFFLED, rotated)
