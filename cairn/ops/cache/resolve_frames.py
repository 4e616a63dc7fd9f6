"""The page map of a cache in frames on the device over pages in host memory: hits, misses and
replacement."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.cache.kernels import resolve_frames_kernel
from cairn.ops.call import Call
from cairn.ops.checks import INT32, INT64, check_rows, expect, refuse
from cairn.ops.registry import op

NOWHERE = -(1 << 31)
"""`frame_of` of a page without a frame."""
AT_ONCE = 1024
"""Entries, or frames, of a block of the kernel's loops."""


@op(mutates=("frame_of", "page_in", "used", "state"))
def resolve_frames(
    indices: Tensor,
    row: Tensor,
    page_table: Tensor,
    frame_of: Tensor,
    page_in: Tensor,
    used: Tensor,
    state: Tensor,
    renewed: Tensor | None = None,
    layer_heads: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Look selected pages up in each KV head's cache of frames and assign frames to missing ones.

    A page that has a frame keeps it. Missing pages are given frames in the order in which they
    first appear, by a clock hand that goes around all frames and skips those of pages that this
    call selects. The page that a frame held before has none from then on. `state` holds the
    position of the hand, the number of the last call, and the counts of hits and of misses:
    distinct pages of a call that had a frame, and that had none.

    Args:
        indices: [T, h_kv, K] int32, logical pages; a negative one is no page.
        row: [T] int64.
        page_table: [rows, max_pages] int32, logical to physical page.
        frame_of: [h_kv, pages] int32, the frame of each page; NOWHERE: none. Changed.
        page_in: [h_kv, F] int32, the page in each frame; negative: none. An entry is out of date
            unless frame_of of that page is the frame. F is at least T * K. Changed.
        used: [h_kv, F] int64, number of the last call that selected each frame's page. Changed.
        state: [h_kv, 4] int64. Changed.
        renewed: [N] int64 or None, pages that were overwritten in host memory: they lose their
            frames first. A negative one is no page.
        layer_heads: heads of a layer, where the h_kv heads are those of several layers, one layer
            after the other; None: all are of one layer.
    Returns:
        frames [T, h_kv, K] int32, -1 where no page is selected; sources and targets [h_kv, T * K]
        int64, what the caller must copy: flat indices of pages in [layers, pages, layer_heads] and
        of their frames in [layers, F, layer_heads], padded with -1.
    Raises:
        BadArgument: for another shape, dtype, device or layout, or too few frames.
    """
    tokens, heads, topk = indices.shape
    pages = page_table[row[:, None, None], indices.clamp(min=0).long()].long()
    pages = pages.masked_fill(indices < 0, -1)
    found = torch.full_like(indices, -1)
    sources = torch.full((heads, tokens * topk), -1, dtype=torch.int64, device=indices.device)
    targets = sources.clone()
    state[:, 1] += 1
    if renewed is not None:
        frame_of[:, renewed[renewed >= 0]] = NOWHERE
    for head in range(heads):
        own = pages[:, head].flatten()
        selected = own >= 0
        wanted, place = own[selected].unique(return_inverse=True)
        # Distinct pages in order of first appearance.
        first = torch.full_like(wanted, own.numel()).scatter_reduce(
            0, place, torch.arange(place.numel(), device=own.device), "amin"
        )
        wanted = wanted[first.argsort()]
        frames = frame_of[head, wanted]
        used[head, frames[frames >= 0].long()] = state[head, 1]
        missing = wanted[frames < 0]
        count = missing.numel()
        around = (torch.arange(used.shape[1], device=own.device) + state[head, 0]) % used.shape[1]
        taken = around[used[head, around] != state[head, 1]][:count]
        before = page_in[head, taken].long()
        stays = (before >= 0) & (frame_of[head, before.clamp(min=0)] == taken)
        frame_of[head, before[stays]] = NOWHERE
        page_in[head, taken] = missing.int()
        frame_of[head, missing] = taken.int()
        used[head, taken] = state[head, 1]
        layer, place = divmod(head, layer_heads or heads)
        for line, entries, of in ((sources, missing, frame_of), (targets, taken, used)):
            at = layer * of.shape[1] + entries
            line[head, :count] = at * (layer_heads or heads) + place
        if count:
            state[head, 0] = (taken[-1] + 1) % used.shape[1]
        state[head, 2] += wanted.numel() - count
        state[head, 3] += count
        frame = frame_of[head, own.clamp(min=0)].masked_fill(~selected, -1)
        found[:, head] = frame.view(tokens, topk)
    return found, sources, targets


@resolve_frames.check
def _(call: Call) -> None:
    name = "resolve_frames"
    expect(name, "indices", call.indices, 3, INT32, dense=-1)
    tokens, heads, topk = call.indices.shape
    check_rows(name, tokens, call.row, call.page_table, call.indices)
    expect(name, "frame_of", call.frame_of, (heads, None), INT32, call.indices, -1)
    expect(name, "page_in", call.page_in, (heads, None), INT32, call.indices, -1)
    expect(name, "used", call.used, call.page_in.shape, INT64, call.indices, -1)
    expect(name, "state", call.state, (heads, 4), INT64, call.indices, -1)
    if call.layer_heads is not None and (call.layer_heads < 1 or heads % call.layer_heads):
        refuse(name, "layer_heads", f"is {call.layer_heads}, which does not divide {heads}")
    if call.renewed is not None:
        expect(name, "renewed", call.renewed, 1, INT64, call.indices, -1)
    if call.page_in.shape[1] < tokens * topk:
        refuse(name, "page_in", f"has {call.page_in.shape[1]} frames, fewer than {tokens * topk}")


@resolve_frames.fake
def _(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    tokens, heads, topk = call.indices.shape
    lines = call.indices.new_empty((heads, tokens * topk), dtype=torch.int64)
    return torch.empty_like(call.indices), lines, torch.empty_like(lines)


@resolve_frames.implementation("triton", devices=gpu.DEVICES, replayed=True)
def _(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """One program a head: it marks each missing page's first entry in frame_of, numbers these
    entries in order, and assigns frames."""
    tokens, heads, topk = call.indices.shape
    frames = gpu.empty(call.indices.shape, torch.int32, call.indices.device)
    lines = (heads, tokens * topk)
    sources, targets = (gpu.empty(lines, torch.int64, call.indices.device) for _ in range(2))
    if heads:
        resolve_frames_kernel[(heads,)](
            indices=call.indices,
            row=call.row,
            page_table=call.page_table,
            frame_of=call.frame_of,
            page_in=call.page_in,
            used=call.used,
            state=call.state,
            renewed=call.renewed,
            found=frames,
            sources=sources,
            targets=targets,
            entries=tokens * topk,
            changed=0 if call.renewed is None else call.renewed.shape[0],
            topk=topk,
            table_stride=call.page_table.stride(0),
            pages=call.frame_of.shape[1],
            frames=call.page_in.shape[1],
            HEADS=heads,
            LAYER_HEADS=call.layer_heads or heads,
            BLOCK=min(AT_ONCE, max(32, gpu.next_power_of_2(tokens * topk))),
            SEARCHED=AT_ONCE,
            num_warps=8,
        )
    return frames, sources, targets
