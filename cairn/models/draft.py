"""A model's own draft layer (multi-token prediction), which guesses the token behind the next one.

Row i reads token i + 1 and the model's hidden state of token i:

    z = fc [norm_e(embed(x_{i+1})) | norm_h(h_i)];   y = norm(block(z));   logits = head(y)

and predicts token i + 2. Further guesses read y in the place of h, and the token guessed last.
Embedding and head are the model's. Source: `qwen3_next_mtp` of vLLM and SGLang, which agree.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cairn.attention.step import BoundLayer
from cairn.layers.linear import Linear
from cairn.layers.norm import RMSNorm
from cairn.layers.registry import Context
from cairn.layers.residual import Residual
from cairn.layers.rotary import Angles
from cairn.layers.schemes.base import Rows
from cairn.layers.weight import Source, Weight
from cairn.models.block import Block, build_norm
from cairn.specs.model import DraftSpec, NormSpec


class DraftLayer(nn.Module):
    """The layer, what joins its two inputs, and their norms.

    Args:
        spec: of the layer.
        norm: of its norms.
        context: what its modules are built with.
    """

    def __init__(self, spec: DraftSpec, norm: NormSpec, context: Context) -> None:
        super().__init__()
        self.names = spec.names
        self.token_norm = build_norm(norm, context.hidden, context.dtype)
        self.state_norm = build_norm(norm, context.hidden, context.dtype)
        parts = [Rows(spec.names.join, context.hidden)]
        self.join = Linear(2 * context.hidden, parts, dtype=context.dtype)
        own = context.within(spec.names.layer) if spec.names.layer else context
        self.block = Block(spec.layer, own)
        self.norm: RMSNorm = build_norm(norm, context.hidden, context.dtype)

    def weights(self, source: Source) -> list[Weight]:
        """Norms, join, block."""
        return [
            *self.token_norm.weights(source, self.names.token_norm),
            *self.state_norm.weights(source, self.names.state_norm),
            *self.norm.weights(source, self.names.norm),
            *self.join.weights(source),
            *self.block.weights(source.within(self.names.layer) if self.names.layer else source),
        ]

    def forward(
        self, embedded: Tensor, states: Tensor, positions: Tensor, layer: BoundLayer
    ) -> Tensor:
        """Run some rows: -> [T, hidden] before the norm.

        Args:
            embedded: [T, hidden], the rows' tokens.
            states: [T, hidden], what stands in front of them.
            positions: [T] int64, rotary positions.
            layer: the backend with its plan.
        """
        joined = torch.cat((self.token_norm(embedded), self.state_norm(states)), dim=-1)
        residual = Residual(self.join(joined))
        self.block(residual, layer, Angles(positions, residual.x.dtype), None)
        return residual.x
