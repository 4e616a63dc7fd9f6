"""Streams that share a GPU's multiprocessors, by sgl-kernel's names."""

from cairn.ops.spatial.green_contexts import create_greenctx_stream_by_value, get_sm_available

__all__ = ["create_greenctx_stream_by_value", "get_sm_available"]
