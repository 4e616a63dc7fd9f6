"""Landmark attention over pages in host memory: selected pages are copied to frames in device
memory.

The window is read from pages on the device. A page is copied to host memory by the step that
completes it, at least a window before a query can select it.

For a chunk, each layer copies its selected pages to frames before attention. If the chunk's pages
do not fit into the frames together, its queries are processed in batches. With few queries on a
GPU, a layer reads pages without a frame directly from host memory, and the pages that all layers
have read are copied to frames after the last layer, for the next step.
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
from cairn.ops import advice
from cairn.specs.hils import HilsSpec

KEY, VALUE = "k", "v"
Pair = tuple[Tensor, Tensor]
"""Keys and values."""
Summaries = tuple[Tensor, Tensor | None]
"""Keys and biases of all pages."""


@dataclass(slots=True)
class FramedStep:
    """Metadata of a step shared by all layers with pages in host memory.

    Attributes:
        frames: of all of them.
        batch: the step.
        place: of the pages under windows.
        page_table: [rows, max_pages] int32 of all pages.
        windows: [N] int64, of the pages that the step completes, those under windows.
        selected: by layer, selected pages that are to be copied to frames, [T, h_kv, K].
    """

    frames: Frames
    batch: Batch
    place: PagePlace
    page_table: Tensor
    windows: Tensor
    selected: list[Tensor] = field(default_factory=list)

    def store(self, near: Pair, layer: int) -> None:
        """Write a layer's pages that the step completes to host memory.

        Args:
            near: of the pages under windows, each [pages, h_kv, S, d].
            layer: place among those with frames.
        """
        far, _ = self.frames.of_layer(layer)
        self._copy(near, far, self.windows, self.batch.completed_pages, near[0][0].nbytes)

    def resolved(self, layer: int, indices: Tensor, row: Tensor, renewed: bool) -> Tensor:
        """Copy selected pages of a layer to frames, unless they have one: -> their frames [t, h_kv,
        K] int32.

        Args:
            layer: place among those with frames.
            indices: [t, h_kv, K], no more than fill the frames; row: [t].
            renewed: this is the layer's first call of the step.
        """
        held = self.frames.map_of(layer)
        found, sources, targets = self._resolve(held, indices, row, renewed)
        source, target = self.frames.of_layer(layer)
        self._copy(source, target, sources.view(-1), targets.view(-1), source[0][0, 0].nbytes)
        return found

    def resolved_together(self, layer: int, indices: Tensor, pages: int) -> Tensor | None:
        """`resolved` of all queries [T, h_kv, K] of a step of one row, which select among its first
        `pages`: each page is looked up once, not once per query. None: they do not fit into the
        frames together."""
        tokens, heads, topk = indices.shape
        # One page more takes the places without a page.
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
        self, spec: HilsSpec, layer: int, inputs: HilsInputs, near: Pair, summaries: Summaries,
        store: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """`ops.framed_attention` of a layer, whose selected pages are copied to frames by `finish`.

        Args:
            store: summaries of completed pages.
        """
        far, frames = self.frames.of_layer(layer)
        found = ops.framed_attention(
            inputs.q, inputs.lmk_q, *near, *far, *frames, self.frames.map_of(layer).frame_of,
            *summaries, self.batch.row, self.batch.slot, self.place.page_table, self.page_table,
            spec.local_window, spec.topk, spec.softmax1, spec.strategy, store,
        )  # fmt: skip
        self.selected.append(found[1])
        return found

    def finish(self, near: Pair, far: Pair) -> None:
        """For all layers, copy the pages that the step completes to host memory, and the selected
        pages to frames.

        Args:
            near, far: tables [layers] uint64 of addresses: of pages under windows, and of all in
                host memory.
        """
        frames = self.frames
        if self.windows.numel():
            ops.transfer_kv_all_layer(
                near[0], far[0], near[1], far[1], self.windows, self.batch.completed_pages,
                frames.far[KEY][0, 0].nbytes, len(frames.layers),
            )  # fmt: skip
        # A rehearsal leaves layers out: the last one's selection stands for theirs.
        missing = len(frames.layers) - len(self.selected)
        indices = torch.stack(self.selected + self.selected[-1:] * missing, 1).flatten(1, 2)
        _, sources, targets = self._resolve(frames.map, indices, self.batch.row, renewed=True)
        source, target = frames.far[KEY], frames.near[KEY]
        of_values = frames.far[VALUE], frames.near[VALUE]
        ops.transfer_kv_per_layer(
            source, target, *of_values, sources.view(-1), targets.view(-1), source[0, 0, 0].nbytes
        )
        self.selected = []

    def _resolve(
        self, held: FrameMap, indices: Tensor, row: Tensor, renewed: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        pages = self.batch.completed_pages if renewed else None
        return ops.resolve_frames(
            indices, row, self.page_table, *held, renewed=pages, layer_heads=self.frames.heads
        )

    def _copy(
        self, source: Pair, target: Pair, sources: Tensor, targets: Tensor, item_size: int
    ) -> None:
        ops.transfer_kv_per_layer(
            source[0], target[0], source[1], target[1], sources, targets, item_size
        )


def attend_framed(
    spec: HilsSpec, layer: int, inputs: HilsInputs, near: Pair, summaries: Summaries,
    step: FramedStep, plan: StepPlan,
) -> Tensor:  # fmt: skip
    """One layer's attention, with selected pages in frames: -> [T, h_q, d] in q's dtype.

    Args:
        spec: of the layer; layer: its number.
        inputs: of the layer.
        near: of the pages under windows, each [pages, h_kv, S, d]; the step's slots are written.
        step: see there; the step's completed pages are stored.
        plan: of the step.
    """
    batch, q, window, size = plan.batch, inputs.q, spec.local_window, near[0].shape[2]
    candidates = max(0, (batch.max_slot - window + 1) // size)
    # On a GPU kernels are compiled for each topk, so there is only one.
    topk = spec.topk if q.is_cuda else max(1, min(spec.topk, candidates))
    where = batch.row, batch.slot
    o_window, lse = ops.window_attention(
        q, *near, *where, step.place.page_table, window,
        aligned=True, mask_landmarks=True, chunked=plan.cuts.chunked,
    )  # fmt: skip
    indices, scores = ops.select_pages(
        inputs.lmk_q, *summaries, lse, *where, step.page_table, size, window, topk,
        strategy=spec.strategy, num_kv_heads=spec.num_kv_heads,
    )  # fmt: skip
    weights, window_weight = advice.shared_weights(scores, lse, spec.softmax1)
    if batch.watch is not None:
        watched = batch.watch
        reads = indices[watched], weights[watched], window_weight[watched]
        plan.reads.append(LayerReads(layer, *reads))
    frames, done = step.frames, []
    place = frames.layers.index(layer)
    _, caches = frames.of_layer(place)
    table = frames.numbers.expand(step.page_table.shape[0], -1)
    one_row = plan.rows is not None and len(plan.rows.row) == 1
    together = step.resolved_together(place, indices, max(1, candidates)) if one_row else None
    most = len(q) if together is not None else frames.count // topk
    for begin in range(0, len(q), most):
        at = slice(begin, begin + most)
        found = together
        if found is None:
            found = step.resolved(place, indices[at], batch.row[at], renewed=begin == 0)
        done.append(ops.page_attention(q[at], *caches, batch.row[at], table, found, weights[at]))
    o_pages = done[0] if len(done) == 1 else torch.cat(done)
    return ops.blend_window(o_pages, o_window, window_weight, q.dtype)
