"""Compressed attention (DeepSeek-V4): one key-value entry per window of tokens."""

from cairn.ops.compress.compress_windows import compress_windows
from cairn.ops.compress.norm_rope_tail import norm_rope_tail

__all__ = ["compress_windows", "norm_rope_tail"]
