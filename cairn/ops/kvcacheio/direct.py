"""Transfers by copies that the host queues, one for each run of slots or page.

Indices are read on the host: a graph cannot capture these. These are not registered ops, since they
only queue copies; torch.compile breaks the graph at each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from cairn.ops.checks import expect, naming, refuse


@naming
def transfer_kv_direct(
    src_layers: Sequence[Tensor],
    dst_layers: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    """Copy tokens between buffers of one layout; slots that are consecutive on both sides are one
    copy.

    Args:
        src_layers, dst_layers: buffers [slots, ...], as many on both sides, of the same rows.
        src_indices, dst_indices: [T] int64 slots, on any device.
        page_size: slots of a page; ignored, the runs are found.
    Raises:
        BadArgument: for lists, shapes, dtypes or indices that do not fit.
    """
    name = "transfer_kv_direct"
    source, target = _indices(name, src_indices, dst_indices, page_size)
    _expect_list(name, "src_layers", src_layers)
    _expect_list(name, "dst_layers", dst_layers)
    if len(src_layers) != len(dst_layers):
        refuse(name, "dst_layers", f"has {len(dst_layers)} buffers, src_layers {len(src_layers)}")
    for src, dst in zip(src_layers, dst_layers, strict=True):
        _expect_rows(name, "dst_layers", dst, src.shape[1:], src.dtype)
        _expect_within(name, "src_indices", source, 1, src.shape[0])
        _expect_within(name, "dst_indices", target, 1, dst.shape[0])
    for begin, end in _runs(source, target):
        read, write, count = source[begin], target[begin], end - begin
        for src, dst in zip(src_layers, dst_layers, strict=True):
            dst[write : write + count].copy_(src[read : read + count], non_blocking=True)


@naming
def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Copy pages of some layers out of buffers of all layers.

    Args:
        src_ptrs: [keys, values], or one buffer for both: [pages, layers, page_size, ...].
        dst_ptrs: buffers [slots, ...] of the layers from layer_id on: of their keys, then (if src
            has values) of their values.
        src_indices, dst_indices: [T] int64 slots, on any device; every page_size-th names a page.
        layer_id: first layer.
        page_size: slots of a page, divides T.
    Raises:
        BadArgument: for lists, shapes, dtypes or indices that do not fit.
    """
    name = "transfer_kv_per_layer_direct_pf_lf"
    pages = _pages(name, src_indices, dst_indices, page_size)
    layers = _expect_paged(name, ("src_ptrs", "dst_ptrs"), src_ptrs, dst_ptrs, layer_id, page_size)
    _expect_within(name, "src_indices", [p for p, _ in pages], page_size, _slots(src_ptrs))
    for dst in dst_ptrs:
        _expect_within(name, "dst_indices", [p for _, p in pages], page_size, dst.shape[0])
    for read, write in pages:
        for at, dst in enumerate(dst_ptrs):
            layer = layer_id + at % layers
            page = src_ptrs[at // layers][read // page_size, layer]
            dst[write : write + page_size].copy_(page, non_blocking=True)


@naming
def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    """Copy pages of all layers into buffers of all layers.

    Args:
        src_ptrs: buffers [slots, ...] of the layers from 0 on: of their keys, then (if dst has
            values) of their values.
        dst_ptrs: [keys, values], or one buffer for both: [pages, layers, page_size, ...].
        src_indices, dst_indices: [T] int64 slots, on any device; every page_size-th names a page.
        page_size: slots of a page, divides T.
    Raises:
        BadArgument: for lists, shapes, dtypes or indices that do not fit.
    """
    name = "transfer_kv_all_layer_direct_lf_pf"
    pages = _pages(name, src_indices, dst_indices, page_size)
    layers = _expect_paged(name, ("dst_ptrs", "src_ptrs"), dst_ptrs, src_ptrs, 0, page_size)
    _expect_within(name, "dst_indices", [p for _, p in pages], page_size, _slots(dst_ptrs))
    for src in src_ptrs:
        _expect_within(name, "src_indices", [p for p, _ in pages], page_size, src.shape[0])
    for read, write in pages:
        for at, src in enumerate(src_ptrs):
            page = dst_ptrs[at // layers][write // page_size, at % layers]
            page.copy_(src[read : read + page_size], non_blocking=True)


def _indices(
    name: str, src_indices: Tensor, dst_indices: Tensor, page_size: int
) -> tuple[list[int], list[int]]:
    """The indices on the host."""
    expect(name, "src_indices", src_indices, (None,), (torch.int64,))
    expect(name, "dst_indices", dst_indices, src_indices.shape, (torch.int64,))
    if page_size < 1:
        refuse(name, "page_size", f"is {page_size}")
    return src_indices.tolist(), dst_indices.tolist()


def _pages(
    name: str, src_indices: Tensor, dst_indices: Tensor, page_size: int
) -> list[tuple[int, int]]:
    """First slots of every page on both sides."""
    source, target = _indices(name, src_indices, dst_indices, page_size)
    if len(source) % page_size:
        refuse(name, "src_indices", f"has {len(source)} slots, not whole pages of {page_size}")
    return list(zip(source[::page_size], target[::page_size], strict=True))


def _runs(source: list[int], target: list[int]) -> Iterator[tuple[int, int]]:
    """[begin, end) of runs in which the indices of both sides are consecutive."""
    begin = 0
    for i in range(1, len(source) + 1):
        goes_on = (
            i < len(source) and source[i] == source[i - 1] + 1 and target[i] == target[i - 1] + 1
        )
        if not goes_on:
            yield begin, i
            begin = i


def _slots(paged: Sequence[Tensor]) -> int:
    return min(x.shape[0] * x.shape[2] for x in paged)


def _expect_paged(
    name: str,
    names: tuple[str, str],
    paged: Sequence[Tensor],
    layers: Sequence[Tensor],
    first: int,
    page_size: int,
) -> int:
    """Check buffers of all layers against those of single layers; how many layers these are."""
    _expect_list(name, names[0], paged)
    _expect_list(name, names[1], layers)
    if len(paged) not in (1, 2):
        refuse(name, names[0], f"has {len(paged)} buffers, not keys and values, or one")
    count, odd = divmod(len(layers), len(paged))
    if odd or not count:
        refuse(name, names[1], f"has {len(layers)} buffers for {len(paged)} of {names[0]}")
    for x in paged:
        if x.dim() < 3 or x.shape[2] != page_size or not 0 <= first <= x.shape[1] - count:
            refuse(
                name,
                names[0],
                f"has shape {list(x.shape)}, not [pages, >= {first + count}, {page_size}, ...]",
            )
    for at, x in enumerate(layers):
        whole = paged[at // count]
        _expect_rows(name, names[1], x, whole.shape[3:], whole.dtype)
    return count


def _expect_list(name: str, argument: str, buffers: Sequence[Tensor]) -> None:
    if not isinstance(buffers, list | tuple):
        refuse(name, argument, f"is a {type(buffers).__name__}, not a list of tensors")
    for x in buffers:
        expect(name, argument, x)
        if not x.dim():
            refuse(name, argument, "holds a number, not [slots, ...]")


def _expect_rows(
    name: str, argument: str, rows: Tensor, shape: torch.Size, dtype: torch.dtype
) -> None:
    expect(name, argument, rows, (None, *shape), (dtype,))


def _expect_within(name: str, argument: str, first: list[int], count: int, slots: int) -> None:
    outside = [at for at in first if not 0 <= at <= slots - count]
    if outside:
        refuse(name, argument, f"names slot {outside[0]} of {slots}")
