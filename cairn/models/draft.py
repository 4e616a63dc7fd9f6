"""A model's draft layer (multi-token prediction), which predicts the token after the next one.

Row i reads token i + 1 and the model's hidden state of token i:

    z = fc [norm_e(embed(x_{i+1})) | norm_h(h_i)];   y = norm(block(z));   logits = head(y)

and predicts token i + 2. Further draft steps read y in place of h, and the last draft token.
Embedding and head are the model's. Source: `qwen3_next_mtp` of vLLM and SGLang, which agree.

In a model with several residual streams h is all of them, stream j of z is A norm_e(embed(x_{i+1}))
+ B norm_h(h_ij), and further draft steps read block(z). The streams are joined before the norm, by
weights of the draft layer. Source: DeepSeek-V4's inference code.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cairn.attention.step import BoundLayer
from cairn.layers.linear import Linear
from cairn.layers.norm import RMSNorm
from cairn.layers.registry import Context
from cairn.layers.residual import Residual, Streams, StreamsHead
from cairn.layers.rotary import Angles
from cairn.layers.schemes.base import Rows
from cairn.layers.weight import Source, Weight
from cairn.models.block import Block, build_norm
from cairn.specs.model import DraftSpec, NormSpec


class DraftLayer(nn.Module):
    """The draft layer, the map that joins its two inputs, and their norms.

    Args:
        spec: of the layer.
        norm: of its norms.
        context: arguments for building its modules.
    """

    def __init__(self, spec: DraftSpec, norm: NormSpec, context: Context) -> None:
        super().__init__()
        self.names, hidden, dtype = spec.names, context.hidden, context.dtype
        self.token_norm = build_norm(norm, hidden, dtype)
        self.state_norm = build_norm(norm, hidden, dtype)
        own = context.within(spec.names.layer) if spec.names.layer else context
        self.join: Joined | Added
        if isinstance(spec.names.join, str):
            self.join = Joined(spec.names.join, hidden, dtype)
        else:
            self.join = Added(spec.names.join, own)
        self.block = Block(spec.layer, own)
        self.norm: RMSNorm = build_norm(norm, hidden, dtype)
        self.streams = spec.layer.streams
        self.streams_head: StreamsHead | None = None
        if self.streams is not None:
            self.streams_head = StreamsHead(self.streams, hidden)

    def weights(self, source: Source) -> list[Weight]:
        """Norms, join, block, and the weights that join streams."""
        found = [
            *self.token_norm.weights(source, self.names.token_norm),
            *self.state_norm.weights(source, self.names.state_norm),
            *self.norm.weights(source, self.names.norm),
            *self.join.weights(source),
            *self.block.weights(source.within(self.names.layer) if self.names.layer else source),
        ]
        if self.streams_head is not None and self.streams is not None:
            found += self.streams_head.weights(source, self.streams.head)
        return found

    def forward(
        self, embedded: Tensor, states: Tensor, positions: Tensor, layer: BoundLayer
    ) -> Tensor:
        """Run some rows: -> [T, width] before the norm.

        Args:
            embedded: [T, hidden], the rows' tokens.
            states: [T, width], hidden states of the tokens before them; all residual streams.
            positions: [T] int64, rotary positions, or [axes, T].
            layer: the backend with its plan.
        """
        if self.streams is not None:
            states = states.unflatten(1, (self.streams.count, -1))
        x = self.join(self.token_norm(embedded), self.state_norm(states))
        kind = Residual if self.streams is None else Streams
        residual = kind(x, slots=positions if positions.dim() == 1 else positions[0])
        self.block(residual, layer, Angles(positions, x.dtype), None)
        return residual.x.flatten(1)


class Joined(nn.Module):
    """One linear map of the concatenated token embedding and state."""

    def __init__(self, name: str, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.map = Linear(2 * hidden, [Rows(name, hidden)], dtype=dtype)

    def weights(self, source: Source) -> list[Weight]:
        """The map."""
        return self.map.weights(source)

    def forward(self, token: Tensor, state: Tensor) -> Tensor:
        """Both [T, hidden] -> [T, hidden]."""
        found: Tensor = self.map(torch.cat((token, state), dim=-1))
        return found


class Added(nn.Module):
    """A linear map of the token embedding, added to a map of each residual stream."""

    def __init__(self, names: tuple[str, str], context: Context) -> None:
        super().__init__()
        self.token_map, self.state_map = (
            Linear(
                context.hidden,
                [Rows(name, context.hidden)],
                dtype=context.dtype,
                scheme=context.scheme,
            )
            for name in names
        )

    def weights(self, source: Source) -> list[Weight]:
        """Both maps."""
        return [*self.token_map.weights(source), *self.state_map.weights(source)]

    def forward(self, token: Tensor, state: Tensor) -> Tensor:
        """[T, hidden] and [T, n, hidden] -> [T, n, hidden]."""
        found: Tensor = self.state_map(state) + self.token_map(token).unsqueeze(1)
        return found
