"""The decoder all models share. What differs between them is in the ModelSpec."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import zip_longest

import torch
from torch import Tensor, nn

from cairn.layers.embedding import Embedding
from cairn.layers.linear import Head, TiedHead
from cairn.layers.mlp import GatedMLP
from cairn.layers.norm import RMSNorm
from cairn.layers.rotary import (
    Rotary,
    hope_frequencies,
    in_range_frequencies,
    standard_frequencies,
)
from cairn.models.attention import Attention, AttentionBatch
from cairn.models.spec import ModelSpec, RotarySpec


def build_rotary(spec: RotarySpec) -> Rotary:
    """The frequencies a RotarySpec names."""
    # On the CPU whatever the default device is: a power on another device rounds differently.
    with torch.device("cpu"):
        if spec.kind == "in_range":
            frequencies = in_range_frequencies(
                spec.head_dim, spec.theta, spec.context_length, spec.period_multiplier
            )
        elif spec.kind == "hope":
            frequencies = hope_frequencies(spec.head_dim, spec.theta, spec.pairs)
        else:
            frequencies = standard_frequencies(spec.head_dim, spec.theta)
    return Rotary(frequencies, spec.rounded)


class Block(nn.Module):
    """One layer: x += attention(norm(x)); x += mlp(norm(x)), or with the norms on the outputs.

    Args:
        spec: the model.
        index: layer number.
        rotary: of this layer.
        dtype: of the parameters.
    """

    def __init__(
        self, spec: ModelSpec, index: int, rotary: Rotary | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.post_norm = spec.post_norm
        self.attention_norm = RMSNorm(spec.hidden_size, spec.eps, dtype=dtype)
        self.attention = Attention(spec, index, rotary, dtype)
        self.mlp_norm = RMSNorm(spec.hidden_size, spec.eps, dtype=dtype)
        self.mlp = GatedMLP(spec.hidden_size, spec.intermediate_size, dtype=dtype)

    def forward(
        self, x: Tensor, batch: AttentionBatch, normed: Tensor | None, behind: Block | None
    ) -> Tensor | None:
        """Run the block on the residual stream x [T, hidden], in place.

        Args:
            normed: x after this block's first norm, if that has been done.
            behind: the next block.
        Returns:
            What is `normed` for the next block.
        """
        if self.post_norm:
            self.attention_norm.add_to(x, self.attention.out(self.attention(x, batch)))
            self.mlp_norm.add_to(x, self.mlp.down(self.mlp(x)))
            return None
        if normed is None:
            attended = self.attention(x, batch, self.attention_norm)
        else:
            attended = self.attention(normed, batch)
        normed = self.attention.out.add_to(x, attended, self.mlp_norm)
        gated = self.mlp(x, self.mlp_norm) if normed is None else self.mlp(normed)
        return self.mlp.down.add_to(x, gated, None if behind is None else behind.attention_norm)


class Decoder(nn.Module):
    """Embedding, blocks, final norm and output head.

    Args:
        spec: the model.
        dtype: of the parameters.
    """

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec = spec
        self.embedding = Embedding(spec.table_rows, spec.hidden_size, dtype=dtype)
        rotaries = {
            layer.rotary: build_rotary(layer.rotary) for layer in spec.layers if layer.rotary
        }
        self.layers = nn.ModuleList(
            Block(spec, i, rotaries[layer.rotary] if layer.rotary else None, dtype)
            for i, layer in enumerate(spec.layers)
        )
        self._running = list(range(len(self.layers)))
        self.norm = RMSNorm(spec.hidden_size, spec.eps, dtype=dtype)
        self.head: Head | TiedHead = (
            TiedHead(self.embedding, spec.vocab_size)
            if spec.tied
            else Head(spec.vocab_size, spec.hidden_size, dtype=dtype)
        )

    @property
    def weight_bytes(self) -> int:
        """Memory of the parameters."""
        return sum(tensor.nbytes for tensor in self.parameters())

    @contextlib.contextmanager
    def abridged(self, backends: Sequence[str]) -> Iterator[None]:
        """Within, a step runs one block of each kind, and the last one: all kernels that the whole
        model runs, for what they compute is of no use. backends: that of each block's attention."""
        kinds = list(enumerate(zip(self.spec.layers, backends, strict=True)))
        first = {kind: i for i, kind in reversed(kinds)}
        every, self._running = self._running, sorted({*first.values(), len(self.layers) - 1})
        try:
            yield
        finally:
            self._running = every

    def forward(self, batch: AttentionBatch) -> Tensor:
        """Run one step: -> hidden states [T, hidden] before the final norm."""
        x: Tensor = self.embedding(batch.input_ids)
        normed: Tensor | None = None
        blocks = [self.layers[i] for i in self._running]
        for block, behind in zip_longest(blocks, blocks[1:]):
            normed = block(x, batch, normed, behind)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """What forward gave [n, hidden] -> float32 logits [n, V] of the user's vocabulary alone."""
        return self.head.logits(hidden, self.norm)
