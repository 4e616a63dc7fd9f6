"""The paged KV cache: writes of a step, and device frames of pages that lie in host memory."""

from cairn.ops.cache.decode_slots import decode_slots
from cairn.ops.cache.resolve_frames import resolve_frames
from cairn.ops.cache.write_kv import write_kv

__all__ = ["decode_slots", "resolve_frames", "write_kv"]
