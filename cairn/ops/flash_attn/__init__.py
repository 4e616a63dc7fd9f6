"""FlashAttention's interface: contiguous, ragged and paged keys, windows, chunks, sinks.

The functions of sgl-kernel's module `flash_attn` are importable from `cairn.ops.flash_attn` too.
"""

from cairn.ops.flash_attn.flash_attn_varlen_func import flash_attn_varlen_func
from cairn.ops.flash_attn.flash_attn_with_kvcache import flash_attn_with_kvcache
from cairn.ops.flash_attn.get_scheduler_metadata import get_scheduler_metadata
from cairn.ops.flash_attn.is_fa3_supported import is_fa3_supported

__all__ = [
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
    "is_fa3_supported",
]
