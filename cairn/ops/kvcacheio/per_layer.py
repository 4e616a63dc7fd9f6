"""Transfers of one layer, by a kernel. block_quota and num_warps_per_block are ignored."""

from __future__ import annotations

from torch import Tensor

from cairn.ops.kvcacheio.copy_slots import copy_slots
from cairn.ops.kvcacheio.layout import Layout
from cairn.ops.kvcacheio.sides import Items, Side, copy


@copy_slots.front
def transfer_kv_per_layer(
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    block_quota: int = 2,
    num_warps_per_block: int = 32,
) -> None:
    """Copy tokens' keys and values between two buffers of one layer.

    The copy runs on the device of the indices; a buffer on the host should be pinned.

    Args:
        src_k, dst_k, src_v, dst_v: [slots, ...] any dtype, contiguous, item_size bytes a slot.
        src_indices, dst_indices: [T] int64 slots; a token with a negative one is left out.
        item_size: bytes, a multiple of 8.
    Raises:
        BadArgument: for a shape, dtype, size, device or (on the host) slot that does not fit.
    """
    layout = Layout(item_size)
    src = Side({"src_k": src_k, "src_v": src_v}, layout)
    dst = Side({"dst_k": dst_k, "dst_v": dst_v}, layout)
    copy("transfer_kv_per_layer", src, dst, src_indices, dst_indices, Items(item_size))


@copy_slots.front
def transfer_kv_per_layer_mla(
    src: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    block_quota: int = 2,
    num_warps_per_block: int = 32,
) -> None:
    """`transfer_kv_per_layer` for MLA caches, with one buffer in place of keys and values.

    Args:
        src, dst: [slots, ...] any dtype, contiguous, item_size bytes a slot.
        src_indices, dst_indices, item_size: as in `transfer_kv_per_layer`.
    Raises:
        BadArgument: for a shape, dtype, size, device or (on the host) slot that does not fit.
    """
    layout = Layout(item_size)
    one, other = Side({"src": src}, layout), Side({"dst": dst}, layout)
    copy("transfer_kv_per_layer_mla", one, other, src_indices, dst_indices, Items(item_size))


@copy_slots.front
def transfer_kv_per_layer_pf_lf(
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    block_quota: int = 2,
    num_warps_per_block: int = 32,
) -> None:
    """Copy one layer out of buffers of all layers, page first.

    Args:
        src_k, src_v: [slots, layers, ...], src_layout_dim bytes a slot.
        dst_k, dst_v: [slots, ...] of layer layer_id, item_size bytes a slot.
        src_indices, dst_indices: [T] int64 slots; a token with a negative one is left out.
        layer_id: of src.
        item_size: bytes, a multiple of 8.
        src_layout_dim: layers * item_size.
    Raises:
        BadArgument: for a shape, dtype, size, device or (on the host) slot that does not fit.
    """
    src = Side({"src_k": src_k, "src_v": src_v}, Layout(src_layout_dim), every=True)
    dst = Side({"dst_k": dst_k, "dst_v": dst_v}, Layout(item_size))
    items = Items(item_size, first=layer_id)
    copy("transfer_kv_per_layer_pf_lf", src, dst, src_indices, dst_indices, items)


@copy_slots.front
def transfer_kv_per_layer_mla_pf_lf(
    src: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    block_quota: int = 2,
    num_warps_per_block: int = 32,
) -> None:
    """`transfer_kv_per_layer_pf_lf` for MLA caches, with one buffer in place of keys and values.

    Args:
        src: [slots, layers, ...], src_layout_dim bytes a slot.
        dst: [slots, ...] of layer layer_id, item_size bytes a slot.
        src_indices, dst_indices, layer_id, item_size, src_layout_dim: as in
            `transfer_kv_per_layer_pf_lf`.
    Raises:
        BadArgument: for a shape, dtype, size, device or (on the host) slot that does not fit.
    """
    one = Side({"src": src}, Layout(src_layout_dim), every=True)
    other = Side({"dst": dst}, Layout(item_size))
    items = Items(item_size, first=layer_id)
    copy("transfer_kv_per_layer_mla_pf_lf", one, other, src_indices, dst_indices, items)


@copy_slots.front
def transfer_kv_per_layer_ph_lf(
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    page_size: int,
    head_num: int,
    block_quota: int = 2,
    num_warps_per_block: int = 32,
) -> None:
    """Copy one layer out of buffers of all layers in pages of heads.

    Args:
        src_k, src_v: [pages, head_num, page_size, layers, ...], src_layout_dim bytes a slot.
        dst_k, dst_v: [slots, head_num, ...] of layer layer_id, item_size bytes a slot.
        src_indices, dst_indices: [T] int64 slots; a token with a negative one is left out.
        layer_id: of src.
        item_size: bytes, a multiple of 8.
        src_layout_dim: layers * item_size.
        page_size, head_num: of src.
    Raises:
        BadArgument: for a shape, dtype, size, device or (on the host) slot that does not fit.
    """
    src = Side(
        {"src_k": src_k, "src_v": src_v}, Layout(src_layout_dim, page_size, head_num), every=True
    )
    dst = Side({"dst_k": dst_k, "dst_v": dst_v}, Layout(item_size))
    items = Items(item_size, first=layer_id)
    copy("transfer_kv_per_layer_ph_lf", src, dst, src_indices, dst_indices, items)
