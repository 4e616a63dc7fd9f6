"""All-reduce over the ranks of a process group, under sgl-kernel's names of custom all-reduce."""

from cairn.ops.allreduce.custom_ar import (
    all_reduce,
    all_reduce_reg,
    all_reduce_unreg,
    allocate_meta_buffer,
    deterministic_all_reduce_reg,
    deterministic_all_reduce_unreg,
    dispose,
    get_graph_buffer_ipc_meta,
    get_meta_buffer_ipc_handle,
    init_custom_ar,
    meta_size,
    register_buffer,
    register_graph_buffers,
)
from cairn.ops.allreduce.mscclpp import (
    mscclpp_allreduce,
    mscclpp_generate_unique_id,
    mscclpp_init_context,
)
from cairn.ops.allreduce.quick_reduce import (
    init_custom_qr,
    qr_all_reduce,
    qr_destroy,
    qr_get_handle,
    qr_max_size,
    qr_open_handles,
)
from cairn.ops.allreduce.symmetric import SymmetricAllReduce

__all__ = [
    "SymmetricAllReduce",
    "all_reduce",
    "all_reduce_reg",
    "all_reduce_unreg",
    "allocate_meta_buffer",
    "deterministic_all_reduce_reg",
    "deterministic_all_reduce_unreg",
    "dispose",
    "get_graph_buffer_ipc_meta",
    "get_meta_buffer_ipc_handle",
    "init_custom_ar",
    "init_custom_qr",
    "meta_size",
    "mscclpp_allreduce",
    "mscclpp_generate_unique_id",
    "mscclpp_init_context",
    "qr_all_reduce",
    "qr_destroy",
    "qr_get_handle",
    "qr_max_size",
    "qr_open_handles",
    "register_buffer",
    "register_graph_buffers",
]
