"""Landmark attention over pages in host memory, with selected pages cached in frames on the device.

Queries read their window from window pages, which are on the device. The step that completes a page
also writes it to host memory; a query can select it a window later at the earliest.

There are two ways through a step:

- many queries (`attend_framed`): each layer copies the pages that it selects into frames and then
  attends to them there. If the pages of all queries do not fit into the frames, queries are
  attended in several batches.
- few queries on a GPU (`FramedStep.attend`, `FramedStep.finish`): a layer reads selected pages that
  have no frame directly from host memory. After the last layer, the missing pages of all layers are
  copied into frames, for the steps to come.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from cairn import ops
from cairn.attention.base import LayerReads, StepPlan
from cairn.attention.batch import Batch, PagePlace
from cairn.attention.inputs import HilsInputs
from cairn.cache.frames import FrameMap, Frames
from cairn.ops import planning
from cairn.specs.hils import HilsSpec

KEY, VALUE = "k", "v"
Pair = tuple[Tensor, Tensor]
"""Keys and values."""
Summaries = tuple[Tensor, Tensor | None]
"""Summary keys and biases of all pages."""


@dataclass(slots=True)
class FramedStep:
    """A step, as far as all layers with pages in host memory share it.

    Attributes:
        frames: of these layers.
        batch: the step's tokens.
        place: page table and locations of window pages.
        page_table: [rows, max_pages] int32, logical page to page in host memory.
        completed: [N] int64, the window pages of the pages that the step completes, in the order of
            `batch.completed_pages`.
        selected: pages that layers have selected and `finish` copies into frames, one [T, h_kv, K]
            int32 a layer.
    """

    frames: Frames
    batch: Batch
    place: PagePlace
    page_table: Tensor
    completed: Tensor
    selected: list[Tensor] = field(default_factory=list)

    def store(self, window: Pair, layer: int) -> None:
        """Write a layer's pages that the step completes to host memory.

        Args:
            window: window pages of the layer, each [window pages, h_kv, S, d].
            layer: its index among the layers with frames.
        """
        host, _ = self.frames.of_layer(layer)
        self._copy(window, host, self.completed, self.batch.completed_pages, window[0][0].nbytes)

    def resolved(self, layer: int, indices: Tensor, row: Tensor, renewed: bool) -> Tensor:
        """Copy selected pages of a layer that have no frame into frames.

        Args:
            layer: its index among the layers with frames.
            indices: [t, h_kv, K] int32, at most as many pages as there are frames.
            row: [t] int64.
            renewed: whether the pages that the step completes may still have frames, with what
                their pages held before: in the layer's first call of a step.
        Returns:
            Their frames [t, h_kv, K] int32.
        """
        frame_map = self.frames.map_of(layer)
        found, sources, targets = self._resolve(frame_map, indices, row, renewed)
        source, target = self.frames.of_layer(layer)
        self._copy(source, target, sources.view(-1), targets.view(-1), source[0][0, 0].nbytes)
        return found

    def resolved_together(self, layer: int, indices: Tensor, pages: int) -> Tensor | None:
        """`resolved` for all queries of a step of one row, which looks each distinct page up once
        and not once a query.

        Args:
            indices: [T, h_kv, K] int32, all below `pages`.
        Returns:
            Frames [T, h_kv, K] int32; None: there are more distinct pages than frames.
        """
        tokens, heads, topk = indices.shape
        # Page number `pages` stands for no page.
        chosen = indices.masked_fill(indices < 0, pages).transpose(0, 1).flatten(1).long()
        marked = torch.zeros(heads, pages + 1, dtype=torch.bool, device=indices.device)
        marked = marked.scatter_(1, chosen, True)[:, :-1]
        numbers = torch.arange(pages, dtype=torch.int32, device=indices.device)
        wanted = torch.where(marked, numbers, pages)
        if pages > self.frames.count:
            if int(marked.sum(1).max()) > self.frames.count:
                return None
            wanted = wanted.sort(1).values[:, : self.frames.count]
        given = wanted.masked_fill(wanted == pages, -1).t().unsqueeze(2).contiguous()
        row = self.batch.row[:1].expand(len(given)).contiguous()
        found = self.resolved(layer, given, row, renewed=True)
        frame = found.new_full((heads, pages + 1), -1)
        frame.scatter_(1, wanted.long(), found.squeeze(2).t())
        return frame.gather(1, chosen).view(heads, tokens, topk).transpose(0, 1).contiguous()

    def attend(
        self, spec: HilsSpec, layer: int, inputs: HilsInputs, window: Pair, summaries: Summaries,
        store: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """`ops.framed_attention` of a layer with few queries; `finish` copies what they miss.

        Args:
            layer: its index among the layers with frames.
            window: window pages of the layer.
            store: also store the summaries of completed pages.
        """
        host, frames = self.frames.of_layer(layer)
        found = ops.framed_attention(
            inputs.q, inputs.lmk_q, *window, *host, *frames, self.frames.map_of(layer).frame_of,
            *summaries, self.batch.row, self.batch.slot, self.place.page_table, self.page_table,
            spec.local_window, spec.topk, spec.softmax1, spec.strategy, store,
        )  # fmt: skip
        self.selected.append(found[1])
        return found

    def finish(self, window: Pair, host: Pair) -> None:
        """For all layers: write the pages that the step completes to host memory, and copy selected
        pages that have no frame into frames.

        Args:
            window, host: [layers] uint64, addresses of the layers' window pages and of their pages
                in host memory.
        """
        frames = self.frames
        if self.completed.numel():
            ops.transfer_kv_all_layer(
                window[0], host[0], window[1], host[1], self.completed, self.batch.completed_pages,
                frames.host[KEY][0, 0].nbytes, len(frames.layers),
            )  # fmt: skip
        # A rehearsal skips layers: repeat the last selection for them.
        missing = len(frames.layers) - len(self.selected)
        indices = torch.stack(self.selected + self.selected[-1:] * missing, 1).flatten(1, 2)
        _, sources, targets = self._resolve(frames.map, indices, self.batch.row, renewed=True)
        source, target = frames.host, frames.cached
        self._copy(
            (source[KEY], source[VALUE]), (target[KEY], target[VALUE]),
            sources.view(-1), targets.view(-1), source[KEY][0, 0, 0].nbytes,
        )  # fmt: skip
        self.selected = []

    def _resolve(
        self, frame_map: FrameMap, indices: Tensor, row: Tensor, renewed: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        pages = self.batch.completed_pages if renewed else None
        return ops.resolve_frames(
            indices, row, self.page_table, *frame_map, renewed=pages, layer_heads=self.frames.heads
        )

    def _copy(
        self, source: Pair, target: Pair, sources: Tensor, targets: Tensor, item_size: int
    ) -> None:
        ops.transfer_kv_per_layer(
            source[0], target[0], source[1], target[1], sources, targets, item_size
        )


def attend_framed(
    spec: HilsSpec, layer: int, inputs: HilsInputs, window_pages: Pair, summaries: Summaries,
    step: FramedStep, plan: StepPlan,
) -> Tensor:  # fmt: skip
    """Attention of one layer for any number of queries: -> [T, h_q, d] in q's dtype.

    Selected pages are copied into frames first. The step's keys and values have been written to
    window pages, and its completed pages to host memory.

    Args:
        spec: of the layer; layer: its number in the model.
        inputs: of the layer.
        window_pages: of the layer, each [window pages, h_kv, S, d].
        summaries: of the layer.
        step: shared by the layers.
        plan: of the step.
    """
    batch, q, window, size = plan.batch, inputs.q, spec.local_window, window_pages[0].shape[2]
    candidates = max(0, (batch.max_slot - window + 1) // size)
    # On a GPU kernels are compiled for each topk, so there is only one.
    topk = spec.topk if q.is_cuda else max(1, min(spec.topk, candidates))
    where = batch.row, batch.slot
    o_window, lse = ops.window_attention(
        q, *window_pages, *where, step.place.page_table, window,
        aligned=True, mask_landmarks=True, chunked=plan.cuts.chunked,
    )  # fmt: skip
    indices, scores = ops.select_pages(
        inputs.lmk_q, *summaries, lse, *where, step.page_table, size, window, topk,
        strategy=spec.strategy, num_kv_heads=spec.num_kv_heads,
    )  # fmt: skip
    weights, window_weight = planning.shared_weights(scores, lse, spec.softmax1)
    if batch.watch is not None:
        watched = batch.watch
        reads = indices[watched], weights[watched], window_weight[watched]
        plan.reads.append(LayerReads(layer, *reads))
    frames, outputs = step.frames, []
    place = frames.layers.index(layer)
    _, caches = frames.of_layer(place)
    table = frames.numbers.expand(step.page_table.shape[0], -1)
    one_row = plan.rows is not None and len(plan.rows.row) == 1
    together = step.resolved_together(place, indices, max(1, candidates)) if one_row else None
    at_once = len(q) if together is not None else frames.count // topk
    for begin in range(0, len(q), at_once):
        at = slice(begin, begin + at_once)
        found = together
        if found is None:
            found = step.resolved(place, indices[at], batch.row[at], renewed=begin == 0)
        outputs.append(ops.page_attention(q[at], *caches, batch.row[at], table, found, weights[at]))
    o_pages = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return ops.blend_window(o_pages, o_window, window_weight, q.dtype)
