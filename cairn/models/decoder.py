"""The decoder shared by all models; their differences are in the ModelSpec."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from cairn.attention.batch import Batch
from cairn.attention.step import BoundLayer, Step
from cairn.distributed.groups import ALONE, Group
from cairn.distributed.rounds import Rounds
from cairn.layers.embedding import Embedding
from cairn.layers.linear import Head, TiedHead
from cairn.layers.registry import Context
from cairn.layers.residual import Residual, Streams, StreamsHead
from cairn.layers.rotary import Angles
from cairn.layers.schemes.registry import scheme_of
from cairn.layers.weight import Source, Weight
from cairn.models.block import Block, build_norm
from cairn.models.draft import DraftLayer
from cairn.models.vision.encoder import VisionEncoder
from cairn.specs.model import ModelSpec


class Decoder(nn.Module):
    """Embedding, blocks, final norm and output head.

    Args:
        spec: the model.
        dtype: of activations, and of parameters that are not quantised.
        group: tensor-parallel ranks; `spec` has one rank's share.
        rounds: of engines that share the experts; None: not shared.
    """

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        group: Group = ALONE,
        rounds: Rounds | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.embedding = Embedding(
            spec.table_rows, spec.hidden_size, dtype=dtype, scale=spec.embedding_scale
        )
        scheme = scheme_of(spec.quantization)
        context = Context(spec.hidden_size, dtype, scheme, {}, group, rounds)
        self.layers = nn.ModuleList(
            Block(layer, context.within(f"{spec.prefix}layers.{i}"))
            for i, layer in enumerate(spec.layers)
        )
        self._running = list(range(len(self.layers)))
        self.join: StreamsHead | None = None
        if spec.streams is not None:
            self.join = StreamsHead(spec.streams, spec.hidden_size)
        self.norm = build_norm(spec.norm, spec.hidden_size, dtype)
        self.head: Head | TiedHead = (
            TiedHead(self.embedding, spec.vocab_size, group)
            if spec.tied
            else Head(spec.vocab_size, spec.hidden_size, dtype=dtype, group=group)
        )
        self.draft: DraftLayer | None = None
        if spec.draft is not None:
            self.draft = DraftLayer(spec.draft, spec.norm, context.within(spec.draft.prefix))
        self.encoder: VisionEncoder | None = None
        if spec.vision is not None:
            self.encoder = VisionEncoder(spec.vision, dtype)

    def weights(self, stored: frozenset[str] | None = None) -> list[Weight]:
        """Every tensor that a checkpoint of this model holds.

        Args:
            stored: names of the tensors of the checkpoint that is read; None: none is.
        """
        spec, source = self.spec, Source(self.spec.prefix, stored)
        found = self._table_weights(source)
        if self.join is not None and spec.streams is not None:
            found += self.join.weights(source, spec.streams.head)
        found += self.norm.weights(source, "norm")
        found += self._head_weights()
        layers = source.within("layers")
        for i, block in enumerate(self.layers):
            found += cast(Block, block).weights(layers.within(str(i)))
        assert len(self.layers) == spec.num_layers
        if self.encoder is not None and spec.vision is not None:
            found += self.encoder.weights(Source(spec.vision.prefix, stored))
        # Last, so that random weights of the others do not depend on whether it is used.
        if self.draft is not None and spec.draft is not None:
            found += self.draft.weights(Source(spec.draft.prefix, stored))
        return found

    @property
    def weight_bytes(self) -> int:
        """Memory of the parameters."""
        return sum(tensor.nbytes for tensor in self.parameters())

    @contextlib.contextmanager
    def abridged(self, backends: Sequence[str]) -> Iterator[None]:
        """Within this context a step runs only one block of each kind and the last one. It runs all
        kernels of the whole model; its results are meaningless. backends: the backend of each
        block's mixer, and of the draft layer's."""
        own = backends[: len(self.layers)]
        kinds = list(enumerate(zip(self.spec.layers, own, strict=True)))
        first = {kind: i for i, kind in reversed(kinds)}
        every, self._running = self._running, sorted({*first.values(), len(self.layers) - 1})
        try:
            yield
        finally:
            self._running = every

    def forward(self, step: Step) -> Tensor:
        """Run one step: -> hidden states [T, hidden] before the final norm; with several residual
        streams all of them, concatenated [T, n * hidden]."""
        residual = self._begin(step.batch)
        angles = Angles(step.batch.positions, residual.x.dtype)
        running = self._running
        for at, i in enumerate(running):
            behind = self.layers[running[at + 1]] if at + 1 < len(running) else None
            self.layers[i](residual, step.layers[i], angles, behind)
        return residual.x.flatten(1)

    def embedded(self, batch: Batch) -> Tensor:
        """Input of the first layer [T, hidden]: embeddings of tokens, and those of an encoder in
        place of placeholder tokens."""
        x: Tensor = self.embedding(batch.input_ids)
        if batch.inserted is not None:
            x.index_copy_(0, batch.inserted.places, batch.inserted.rows)
        return x

    def encode(self, pixels: Tensor) -> Tensor:
        """An image or a video [frames, height, width, 3] uint8 -> its embeddings [n, hidden]."""
        assert self.encoder is not None
        found: Tensor = self.encoder(pixels)
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        """Results of `forward` for n tokens -> float32 logits [n, V] over the user vocabulary."""
        self.head.group.expect_equal("hidden states behind the last layer", hidden)
        return self.head.logits(joined(hidden, self.join), self.norm)

    def draft_states(self, hidden: Tensor) -> Tensor:
        """Results of `forward` -> hidden states for the draft layer [T, width]."""
        spec = self.spec.draft
        assert spec is not None
        return cast(Tensor, self.norm(hidden)) if spec.normed else hidden

    def guess(
        self, embedded: Tensor, states: Tensor, positions: Tensor, layer: BoundLayer
    ) -> Tensor:
        """Run the draft layer: -> [T, width] before its norm.

        Args:
            embedded: [T, hidden], `embedded` of the tokens.
            states: [T, width], `draft_states` of the tokens before these, or `next_states`.
            positions: [T] int64 or [axes, T], rotary positions.
            layer: the draft layer's backend with its plan.
        """
        assert self.draft is not None
        found: Tensor = self.draft(embedded, states, positions, layer)
        return found

    def guess_logits(self, guessed: Tensor) -> Tensor:
        """Results of `guess` [n, width] -> float32 logits [n, V] of the next tokens."""
        assert self.draft is not None
        self.head.group.expect_equal("hidden states behind the draft layer", guessed)
        return self.head.logits(joined(guessed, self.draft.streams_head), self.draft.norm)

    def next_states(self, guessed: Tensor) -> Tensor:
        """Results of `guess` [n, width] -> hidden states for the next draft step [n, width]."""
        assert self.draft is not None
        if self.spec.streams is not None:
            return guessed
        found: Tensor = self.draft.norm(guessed)
        return found

    def _begin(self, batch: Batch) -> Residual:
        """The residual stream, or the streams, of a step's tokens."""
        embedded, streams = self.embedded(batch), self.spec.streams
        if streams is None:
            return Residual(embedded, batch.input_ids, batch.slot)
        begun = embedded.unsqueeze(1).repeat(1, streams.count, 1)
        return Streams(begun, batch.input_ids, batch.slot)

    def _table_weights(self, source: Source) -> list[Weight]:
        spec, table = self.spec, self.embedding.weight
        # The embedding of page ends is row V of the table. A separate tensor is copied there, so
        # that id V needs no special case and never indexes past the table.
        rows = slice(0, spec.vocab_size if spec.end_embedding else spec.table_rows)
        shape = spec.embedding_rows, spec.hidden_size
        name = source.name(f"{spec.table}.weight")
        found = [Weight(name, shape, table, rows, rows)]
        if spec.end_embedding is not None:
            parameter = table if spec.table_rows > spec.vocab_size else None
            name = source.name(spec.end_embedding)
            found.append(Weight(name, (spec.hidden_size,), parameter, spec.vocab_size))
        return found

    def _head_weights(self) -> list[Weight]:
        spec = self.spec
        name = f"{spec.head}.weight"
        if isinstance(self.head, TiedHead):
            shape = spec.embedding_rows, spec.hidden_size
            return [Weight(name, shape, None, required=False)]
        shape = spec.head_rows, spec.hidden_size
        part = self.head.part
        rows = slice(part.start, part.stop)
        return [Weight(name, shape, self.head.weight, slice(0, len(part)), rows)]


def joined(states: Tensor, head: StreamsHead | None) -> Tensor:
    """Hidden states [n, hidden] as input of the output head."""
    return states if head is None else cast(Tensor, head(states))
