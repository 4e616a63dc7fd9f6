"""Landmark attention over pages in host memory: what queries select comes into frames.

The window is read from pages on the device. A page is stored to host memory by the step that
completes it, a window before a query may select it. Queries whose pages might not fit into the
frames together are attended one batch after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cairn import ops
from cairn.attention.base import LayerReads, StepPlan
from cairn.attention.batch import Batch, PagePlace
from cairn.attention.inputs import HilsInputs
from cairn.cache.frames import Frames
from cairn.ops import advice
from cairn.specs.hils import HilsSpec

Pair = tuple[Tensor, Tensor]
"""Keys and values."""


def stored_sheets(batch: Batch, near: Tensor, page_size: int, heads: int) -> Pair:
    """Sheets of the pages that a step completes, numbered page * heads + head: where they are among
    the pages under windows, and where they go in host memory, each [N * heads] int64.

    Args:
        batch: the step.
        near: [T] int64, locations of its slots under windows.
        page_size, heads: of the layer.
    """
    head, pages = torch.arange(heads, device=near.device), batch.completed_pages
    source = (near[batch.completed] // page_size)[:, None] * heads + head
    # Padding stays negative: it is not copied.
    target = torch.where(pages[:, None] < 0, -1, pages[:, None] * heads + head)
    return source.view(-1), target.view(-1)


@dataclass(frozen=True, slots=True)
class FramedPages:
    """A layer whose pages lie in host memory, in one step.

    Attributes:
        spec: of the layer.
        near: of the pages under windows, each [window pages, h_kv, S, d].
        place: where these are.
        far: in host memory, each [pages, h_kv, S, d].
        page_table: [rows, max_pages] int32 of all pages.
        frames: of the layer.
        completed: pages that the step completes; see `Batch`.
    """

    spec: HilsSpec
    near: Pair
    place: PagePlace
    far: Pair
    page_table: Tensor
    frames: Frames
    completed: Tensor

    def store(self, sheets: Pair) -> None:
        """Write the pages that the step completes to host memory."""
        self._copy(self.near, self.far, *sheets)

    def attend(self, q: Tensor, indices: Tensor, row: Tensor, weights: Tensor) -> Tensor:
        """`ops.page_attention` over selected pages: [T, h_q, d] float32."""
        frames, done = self.frames, []
        caches = frames.tensors["k"], frames.tensors["v"]
        own = frames.numbers.expand(self.page_table.shape[0], -1)
        most = frames.count // indices.shape[2]
        for begin in range(0, len(q), most):
            at = slice(begin, begin + most)
            found, sources, targets = ops.resolve_frames(
                indices[at], row[at], self.page_table,
                frames.frame_of, frames.page_in, frames.used, frames.state,
                None if begin else self.completed,
            )  # fmt: skip
            self._copy(self.far, caches, sources.view(-1), targets.view(-1))
            done.append(ops.page_attention(q[at], *caches, row[at], own, found, weights[at]))
        return done[0] if len(done) == 1 else torch.cat(done)

    def _copy(self, source: Pair, target: Pair, sources: Tensor, targets: Tensor) -> None:
        sheet = source[0][0, 0].nbytes
        ops.transfer_kv_per_layer(
            source[0], target[0], source[1], target[1], sources, targets, sheet
        )


def attend_framed(
    layer: int,
    framed: FramedPages,
    inputs: HilsInputs,
    summaries: tuple[Tensor, Tensor | None],
    plan: StepPlan,
) -> Tensor:
    """One layer's attention: -> [T, h_q, d] in q's dtype.

    Args:
        layer: its number.
        framed: the layer in this step; completed pages are stored.
        inputs: of the layer.
        summaries: keys and biases of all pages.
        plan: of the step.
    """
    spec, batch, q = framed.spec, plan.batch, inputs.q
    window, size = spec.local_window, framed.near[0].shape[2]
    candidates = max(0, (batch.max_slot - window + 1) // size)
    # On a GPU kernels are compiled for each topk, so there is only one.
    topk = spec.topk if q.is_cuda else max(1, min(spec.topk, candidates))
    where = batch.row, batch.slot
    o_window, lse = ops.window_attention(
        q, *framed.near, *where, framed.place.page_table, window,
        aligned=True, mask_landmarks=True, chunked=plan.cuts.chunked,
    )  # fmt: skip
    indices, scores = ops.select_pages(
        inputs.lmk_q, *summaries, lse, *where, framed.page_table, size, window, topk,
        strategy=spec.strategy, num_kv_heads=spec.num_kv_heads,
    )  # fmt: skip
    weights, window_weight = advice.shared_weights(scores, lse, spec.softmax1)
    if batch.watch is not None:
        at = batch.watch
        plan.reads.append(LayerReads(layer, indices[at], weights[at], window_weight[at]))
    o_pages = framed.attend(q, indices, batch.row, weights)
    return ops.blend_window(o_pages, o_window, window_weight, q.dtype)
