"""The decoder that all models share. What differs between them is in the ModelSpec."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from cairn.attention.step import BoundLayer, Step
from cairn.layers.embedding import Embedding
from cairn.layers.linear import Head, TiedHead
from cairn.layers.norm import RMSNorm
from cairn.layers.registry import Context, Ffn, Mixer, build_ffn, build_mixer
from cairn.layers.residual import Residual
from cairn.layers.rotary import Angles
from cairn.layers.schemes.registry import scheme_of
from cairn.layers.weight import Source, Weight
from cairn.specs.model import LayerSpec, ModelSpec, NormSpec

NORMS = ("mixer_norm", "ffn_norm", "mixer_out_norm", "ffn_out_norm")


class Block(nn.Module):
    """One layer: x += mixer(norm(x)); x += ffn(norm(x)), with norms on the outputs beside those on
    the inputs, or in their place.

    Args:
        spec: of the layer.
        context: what its modules are built with.
    """

    mixer_norm: RMSNorm | None
    ffn_norm: RMSNorm | None
    mixer_out_norm: RMSNorm | None
    ffn_out_norm: RMSNorm | None

    def __init__(self, spec: LayerSpec, context: Context) -> None:
        super().__init__()
        self.names = spec.names
        for field in NORMS:
            named = getattr(spec.names, field) is not None
            norm = build_norm(spec.norm, context.hidden, context.dtype) if named else None
            self.register_module(field, norm)
        self.mixer = build_mixer(spec.mixer, context)
        self.ffn = build_ffn(spec.ffn, context)

    def weights(self, source: Source) -> list[Weight]:
        """Norms, feed-forward part, mixer."""
        mixer, ffn = cast(Mixer, self.mixer), cast(Ffn, self.ffn)
        norms = [(getattr(self, field), getattr(self.names, field)) for field in NORMS]
        return [
            *(w for norm, name in norms if norm is not None for w in norm.weights(source, name)),
            *ffn.weights(source.within(self.names.ffn)),
            *mixer.weights(source.within(self.names.mixer)),
        ]

    def forward(
        self, residual: Residual, layer: BoundLayer, angles: Angles, behind: Block | None
    ) -> None:
        """Run the block on the residual stream; `behind` is the block that reads it next."""
        mixed = self.mixer(residual.read(self.mixer_norm), layer, angles)
        residual.add(mixed, next_norm=self.ffn_norm, own_norm=self.mixer_out_norm)
        next_norm = None if behind is None else behind.mixer_norm
        fed = self.ffn(residual.read(self.ffn_norm))
        residual.add(fed, next_norm=next_norm, own_norm=self.ffn_out_norm)


class Decoder(nn.Module):
    """Embedding, blocks, final norm and output head.

    Args:
        spec: the model.
        dtype: of activations, and of parameters that are not quantised.
    """

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec = spec
        self.embedding = Embedding(
            spec.table_rows, spec.hidden_size, dtype=dtype, scale=spec.embedding_scale
        )
        context = Context(spec.hidden_size, dtype, scheme_of(spec.quantization), {})
        self.layers = nn.ModuleList(Block(layer, context) for layer in spec.layers)
        self._running = list(range(len(self.layers)))
        self.norm = build_norm(spec.norm, spec.hidden_size, dtype)
        self.head: Head | TiedHead = (
            TiedHead(self.embedding, spec.vocab_size)
            if spec.tied
            else Head(spec.vocab_size, spec.hidden_size, dtype=dtype)
        )

    def weights(self, stored: frozenset[str] | None = None) -> list[Weight]:
        """Every tensor that a checkpoint of this model holds.

        Args:
            stored: names of the tensors of the checkpoint that is read; None: none is.
        """
        spec, source = self.spec, Source(self.spec.prefix, stored)
        found = self._table_weights(source)
        found += self.norm.weights(source, "norm")
        found += self._head_weights()
        layers = source.within("layers")
        for i, block in enumerate(self.layers):
            found += cast(Block, block).weights(layers.within(str(i)))
        assert len(self.layers) == spec.num_layers
        return found

    @property
    def weight_bytes(self) -> int:
        """Memory of the parameters."""
        return sum(tensor.nbytes for tensor in self.parameters())

    @contextlib.contextmanager
    def abridged(self, backends: Sequence[str]) -> Iterator[None]:
        """Within, a step runs one block of each kind, and the last one: all kernels that the whole
        model runs, for what they compute is of no use. backends: that of each block's mixer."""
        kinds = list(enumerate(zip(self.spec.layers, backends, strict=True)))
        first = {kind: i for i, kind in reversed(kinds)}
        every, self._running = self._running, sorted({*first.values(), len(self.layers) - 1})
        try:
            yield
        finally:
            self._running = every

    def forward(self, step: Step) -> Tensor:
        """Run one step: -> hidden states [T, hidden] before the final norm."""
        residual = Residual(self.embedding(step.batch.input_ids))
        angles = Angles(step.batch.positions, residual.x.dtype)
        running = self._running
        for at, i in enumerate(running):
            behind = self.layers[running[at + 1]] if at + 1 < len(running) else None
            self.layers[i](residual, step.layers[i], angles, behind)
        return residual.x

    def logits(self, hidden: Tensor) -> Tensor:
        """What forward gave [n, hidden] -> float32 logits [n, V] of the user's vocabulary alone."""
        return self.head.logits(hidden, self.norm)

    def _table_weights(self, source: Source) -> list[Weight]:
        spec, table = self.spec, self.embedding.weight
        # The embedding of page ends is row V of the table. A tensor of its own is put there, so
        # that id V needs no special case and can never index past the table.
        rows = slice(0, spec.vocab_size if spec.end_embedding else spec.table_rows)
        shape = spec.embedding_rows, spec.hidden_size
        name = source.name("embed_tokens.weight")
        found = [Weight(name, shape, table, rows, rows, shard=0)]
        if spec.end_embedding is not None:
            parameter = table if spec.table_rows > spec.vocab_size else None
            name = source.name(spec.end_embedding)
            found.append(Weight(name, (spec.hidden_size,), parameter, spec.vocab_size))
        return found

    def _head_weights(self) -> list[Weight]:
        spec, rows = self.spec, slice(0, self.spec.vocab_size)
        if isinstance(self.head, TiedHead):
            shape = spec.embedding_rows, spec.hidden_size
            return [Weight("lm_head.weight", shape, None, required=False)]
        shape = spec.head_rows, spec.hidden_size
        return [Weight("lm_head.weight", shape, self.head.weight, rows, rows, shard=0)]


def build_norm(spec: NormSpec, width: int, dtype: torch.dtype) -> RMSNorm:
    """A norm of the residual stream."""
    return RMSNorm(width, spec.eps, dtype=dtype, unit_offset=spec.unit_offset)
