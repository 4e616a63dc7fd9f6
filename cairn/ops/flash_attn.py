"""What sgl-kernel has in its module `flash_attn`; here it is of the family `flash`."""

from cairn.ops.flash.flash_attn_varlen_func import flash_attn_varlen_func
from cairn.ops.flash.flash_attn_with_kvcache import flash_attn_with_kvcache
from cairn.ops.flash.get_scheduler_metadata import get_scheduler_metadata
from cairn.ops.flash.is_fa3_supported import is_fa3_supported

__all__ = [
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
    "is_fa3_supported",
]
