"""Rows scattered into caches and gathered from tables, and weak references to memory.

What sgl-kernel has of these in its module `memory` is in `cairn.ops.memory` too.
"""

from cairn.ops.memory.set_kv_buffer_kernel import set_kv_buffer_kernel
from cairn.ops.memory.weak_ref_tensor import weak_ref_tensor

__all__ = ["set_kv_buffer_kernel", "weak_ref_tensor"]
