"""Transfers of all layers at once, by a kernel, with tables of the layers' addresses.

torch.compile breaks the graph at each of these; CUDA graphs capture them. block_quota and
num_warps_per_block are ignored.
"""

from __future__ import annotations

from torch import Tensor

from cairn.ops.kvcacheio.copy_slots import copy_slots
from cairn.ops.kvcacheio.layout import Layout
from cairn.ops.kvcacheio.sides import Items, Side, copy


@copy_slots.front
def transfer_kv_all_layer(
    src_k_layers: Tensor,
    dst_k_layers: Tensor,
    src_v_layers: Tensor,
    dst_v_layers: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    num_layers: int,
    block_quota: int = 2,
    num_warps_per_block: int = 32,
) -> None:
    """Copy tokens' keys and values of all layers between buffers of single layers.

    Args:
        src_k_layers, dst_k_layers, src_v_layers, dst_v_layers: [num_layers] uint64 addresses of
            buffers of item_size bytes a slot, on the device of the indices or in pinned memory;
            multiples of 8.
        src_indices, dst_indices: [T] int64 slots; a token with a negative one is left out.
        item_size: bytes, a multiple of 8.
    Raises:
        BadArgument: for a shape, dtype, size, device or (on the host) slot that does not fit.
    """
    layout = Layout(item_size)
    src = Side({"src_k_layers": src_k_layers, "src_v_layers": src_v_layers}, layout, tables=True)
    dst = Side({"dst_k_layers": dst_k_layers, "dst_v_layers": dst_v_layers}, layout, tables=True)
    items = Items(item_size, num_layers)
    copy("transfer_kv_all_layer", src, dst, src_indices, dst_indices, items)


@copy_slots.front
def transfer_kv_all_layer_mla(
    src_layers: Tensor,
    dst_layers: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    num_layers: int,
    block_quota: int = 2,
    num_warps_per_block: int = 32,
) -> None:
    """`transfer_kv_all_layer` for MLA caches, with one buffer in place of keys and values.

    Args:
        src_layers, dst_layers: [num_layers] uint64, as in `transfer_kv_all_layer`.
        src_indices, dst_indices, item_size: as in `transfer_kv_all_layer`.
    Raises:
        BadArgument: for a shape, dtype, size, device or (on the host) slot that does not fit.
    """
    layout = Layout(item_size)
    src = Side({"src_layers": src_layers}, layout, tables=True)
    dst = Side({"dst_layers": dst_layers}, layout, tables=True)
    items = Items(item_size, num_layers)
    copy("transfer_kv_all_layer_mla", src, dst, src_indices, dst_indices, items)


@copy_slots.front
def transfer_kv_all_layer_lf_pf(
    src_k_layers: Tensor,
    dst_k: Tensor,
    src_v_layers: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    block_quota: int = 2,
    num_warps_per_block: int = 32,
) -> None:
    """Copy all layers from buffers of single layers into buffers of all, page first.

    Args:
        src_k_layers, src_v_layers: [num_layers] uint64 addresses, as in `transfer_kv_all_layer`.
        dst_k, dst_v: [slots, layers, ...] any dtype, contiguous, dst_layout_dim bytes a slot.
        src_indices, dst_indices: [T] int64 slots; a token with a negative one is left out.
        item_size: bytes, a multiple of 8.
        dst_layout_dim: layers * item_size.
    Raises:
        BadArgument: for a shape, dtype, size, device or (on the host) slot that does not fit.
    """
    layout = Layout(item_size)
    src = Side({"src_k_layers": src_k_layers, "src_v_layers": src_v_layers}, layout, tables=True)
    dst = Side({"dst_k": dst_k, "dst_v": dst_v}, Layout(dst_layout_dim), every=True)
    items = Items(item_size, num_layers)
    copy("transfer_kv_all_layer_lf_pf", src, dst, src_indices, dst_indices, items)


@copy_slots.front
def transfer_kv_all_layer_mla_lf_pf(
    src_layers: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    block_quota: int = 2,
    num_warps_per_block: int = 32,
) -> None:
    """`transfer_kv_all_layer_lf_pf` for MLA caches, with one buffer in place of keys and values.

    Args:
        src_layers: [num_layers] uint64 addresses, as in `transfer_kv_all_layer`.
        dst: [slots, layers, ...], dst_layout_dim bytes a slot.
        src_indices, dst_indices, item_size, dst_layout_dim: as in `transfer_kv_all_layer_lf_pf`.
    Raises:
        BadArgument: for a shape, dtype, size, device or (on the host) slot that does not fit.
    """
    one = Side({"src_layers": src_layers}, Layout(item_size), tables=True)
    other = Side({"dst": dst}, Layout(dst_layout_dim), every=True)
    items = Items(item_size, num_layers)
    copy("transfer_kv_all_layer_mla_lf_pf", one, other, src_indices, dst_indices, items)


@copy_slots.front
def transfer_kv_all_layer_lf_ph(
    src_k_layers: Tensor,
    dst_k: Tensor,
    src_v_layers: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    page_size: int,
    head_num: int,
    block_quota: int = 2,
    num_warps_per_block: int = 32,
) -> None:
    """Copy all layers from buffers of single layers into buffers of all in pages of heads.

    Args:
        src_k_layers, src_v_layers: [num_layers] uint64 addresses, as in `transfer_kv_all_layer`.
        dst_k, dst_v: [pages, head_num, page_size, layers, ...], dst_layout_dim bytes a slot.
        src_indices, dst_indices: [T] int64 slots; a token with a negative one is left out.
        item_size: bytes, a multiple of 8.
        dst_layout_dim: layers * item_size.
        page_size, head_num: of dst.
    Raises:
        BadArgument: for a shape, dtype, size, device or (on the host) slot that does not fit.
    """
    layout = Layout(item_size)
    src = Side({"src_k_layers": src_k_layers, "src_v_layers": src_v_layers}, layout, tables=True)
    dst = Side(
        {"dst_k": dst_k, "dst_v": dst_v}, Layout(dst_layout_dim, page_size, head_num), every=True
    )
    items = Items(item_size, num_layers)
    copy("transfer_kv_all_layer_lf_ph", src, dst, src_indices, dst_indices, items)
