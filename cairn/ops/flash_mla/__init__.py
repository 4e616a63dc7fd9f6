"""FlashMLA's functions: latent attention over a paged cache, over selected slots of it, and over
selected rows of a contiguous KV tensor."""

from cairn.ops.flash_mla.flash_mla_sparse_fwd import flash_mla_sparse_fwd
from cairn.ops.flash_mla.flash_mla_with_kvcache import (
    flash_mla_with_kvcache,
    flash_mla_with_kvcache_sm90,
)
from cairn.ops.flash_mla.get_mla_metadata import get_mla_metadata

__all__ = [
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "flash_mla_with_kvcache_sm90",
    "get_mla_metadata",
]
