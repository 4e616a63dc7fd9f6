"""Attention of all heads over one latent record per token and over compressed entries
(DeepSeek-V4).

Shapes: T tokens, H heads of size D, g groups of outputs; Hi heads of the indexer, Di their size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cairn import ops
from cairn.attention.inputs import CompressedInputs, Compression, EntryInputs, IndexInputs
from cairn.attention.step import BoundLayer
from cairn.distributed.groups import ALONE, Group
from cairn.layers.linear import PLAIN, Linear
from cairn.layers.norm import RMSNorm
from cairn.layers.residual import Delta, Hidden, Product
from cairn.layers.rotary import Angles, Rotary
from cairn.layers.schemes.base import Rows, Scheme
from cairn.layers.weight import Source, Weight
from cairn.specs.compressed import CompressedSpec, CompressionSpec


class Compressor(nn.Module):
    """Parameters that compress the inputs of a window's tokens to an entry: a bias for each
    position in the window, and a norm.

    Args:
        spec: windows.
        dim: d, elements of an entry.
        eps: of the norm.
    """

    def __init__(self, spec: CompressionSpec, dim: int, eps: float) -> None:
        super().__init__()
        self.wide = dim * (1 + spec.overlap)
        bias = torch.empty(spec.rate, self.wide, dtype=torch.float32)
        self.bias = nn.Parameter(bias, requires_grad=False)
        self.norm = RMSNorm(dim, eps, dtype=torch.float32)

    def weights(self, source: Source) -> list[Weight]:
        """ape and norm."""
        shape = tuple(self.bias.shape)
        bias = Weight(source.name("ape"), shape, self.bias, draw="around_zero")
        return [bias, *self.norm.weights(source, "norm")]

    def of(self, cos_sin: Tensor) -> Compression:
        """These with the angles [T, dr] of a step: those of the window that each token closes."""
        return Compression(self.bias, self.norm.weight, self.norm.eps, cos_sin)


class CompressedAttention(nn.Module):
    """Self-attention of one layer.

    Args:
        spec: sizes, rotary embedding, and the compression of earlier tokens.
        hidden: width of the residual stream.
        rotary: of the last dimensions.
        dtype: of activations.
        scheme: storage of the weight matrices.
        group: tensor-parallel ranks, which divide the groups of heads; `spec` has one rank's share.
            Records, entries and the indexer are replicated.
    """

    def __init__(
        self,
        spec: CompressedSpec,
        hidden: int,
        rotary: Rotary,
        dtype: torch.dtype,
        scheme: Scheme = PLAIN,
        group: Group = ALONE,
    ) -> None:
        super().__init__()
        self.spec, self.rotary = spec, rotary
        heads, dim, rank = spec.num_heads, spec.head_dim, spec.q_lora_rank
        down = [Rows("wq_a", rank), Rows("wkv", dim)]
        self.down = Linear(hidden, down, dtype=dtype, scheme=scheme)
        self.q_norm = RMSNorm(rank, spec.eps, dtype=dtype)
        self.kv_norm = RMSNorm(dim, spec.eps, dtype=dtype)
        up, own = [Rows("wq_b", heads * dim)], spec.compression
        if own is not None and own.index_heads:
            # Both read the same latent, so they are one matrix product.
            up.append(Rows("indexer.wq_b", own.index_heads * own.index_dim))
        self.q_up = Linear(rank, up, dtype=dtype, scheme=scheme)
        # Kept unquantised: it is applied separately for each group.
        grouped = [Rows("wo_a", spec.out_groups * spec.out_rank)]
        within = heads * dim // spec.out_groups
        self.group_out = Linear(within, grouped, dtype=dtype, scheme=scheme.unpacked)
        out = [Rows("wo_b", hidden)]
        inner = spec.out_groups * spec.out_rank
        self.out = Linear(inner, out, dtype=dtype, scheme=scheme, group=group)
        self.sink = nn.Parameter(torch.empty(heads, dtype=torch.float32), requires_grad=False)
        self.side: Linear | None = None
        self.compressor: Compressor | None = None
        self.index_compressor: Compressor | None = None
        if own is not None:
            self._compress(own, hidden, dtype)

    def _compress(self, own: CompressionSpec, hidden: int, dtype: torch.dtype) -> None:
        """Create the compressors, and the projection of their inputs, which is not quantised."""
        self.compressor = Compressor(own, self.spec.head_dim, self.spec.eps)
        wide = self.compressor.wide
        side = [Rows("compressor.wkv", wide), Rows("compressor.wgate", wide)]
        if own.index_heads:
            self.index_compressor = Compressor(own, own.index_dim, self.spec.eps)
            wide = self.index_compressor.wide
            side += [Rows(f"indexer.compressor.{name}", wide) for name in ("wkv", "wgate")]
            side.append(Rows("indexer.weights_proj", own.index_heads))
        self.side = Linear(hidden, side, dtype=dtype)

    def weights(self, source: Source) -> list[Weight]:
        """Projections, norms, attn_sink, compressor.* and indexer.*."""
        found = [
            weight
            for linear in (self.down, self.q_up, self.group_out, self.out, self.side)
            if linear is not None
            for weight in linear.weights(source)
        ]
        found += self.q_norm.weights(source, "q_norm")
        found += self.kv_norm.weights(source, "kv_norm")
        sink = Weight(source.name("attn_sink"), self.sink.shape, self.sink, draw="around_zero")
        found.append(sink)
        if self.compressor is not None:
            found += self.compressor.weights(source.within("compressor"))
        if self.index_compressor is not None:
            found += self.index_compressor.weights(source.within("indexer.compressor"))
        return found

    def forward(self, h: Hidden, layer: BoundLayer, angles: Angles) -> Delta:
        """[T, hidden] -> the delta [T, hidden]."""
        x, spec, cos_sin = h.value(), self.spec, angles.of(self.rotary)
        heads, dim = spec.num_heads, spec.head_dim
        q_latent, kv = self.down(x).split((spec.q_lora_rank, dim), dim=-1)
        projected = self.q_up(self.q_norm(q_latent))
        q = projected[:, : heads * dim].unflatten(1, (heads, dim))
        q = ops.norm_rope_tail(q, cos_sin, eps=spec.eps)
        kv = ops.norm_rope_tail(kv.unsqueeze(1), cos_sin, self.kv_norm.weight, spec.eps).squeeze(1)
        entries = self._entries(x, projected[:, heads * dim :], angles)
        o = layer.run(CompressedInputs(q, kv, self.sink, entries))
        o = ops.norm_rope_tail(o, cos_sin, inverse=True, dtype=x.dtype)
        grouped = o.view(len(x), spec.out_groups, -1)
        y = x.new_empty(len(x), spec.out_groups, spec.out_rank)
        matrices = self.group_out.weight.unflatten(0, (spec.out_groups, spec.out_rank))
        torch.bmm(grouped.transpose(0, 1), matrices.transpose(1, 2), out=y.transpose(0, 1))
        return Product(self.out, y.flatten(1))

    def _entries(self, x: Tensor, index_q: Tensor, angles: Angles) -> EntryInputs | None:
        """The inputs of entries, and the indexer's queries; None in a layer without entries.

        Args:
            x: [T, hidden].
            index_q: [T, Hi * Di], queries of the indexer before their rotation.
        """
        own = self.spec.compression
        if own is None or self.compressor is None or self.side is None:
            return None
        side = ops.linear(x, self.side.weight, dtype=torch.float32)
        begins = angles.of(self.rotary, own.rate - 1)
        compression = self.compressor.of(begins)
        if self.index_compressor is None:
            return EntryInputs(side, compression)
        inputs, weights = side.split((side.shape[1] - own.index_heads, own.index_heads), dim=-1)
        q = index_q.unflatten(1, (own.index_heads, own.index_dim))
        q = ops.norm_rope_tail(q, angles.of(self.rotary))
        scale = (own.index_heads * own.index_dim) ** -0.5
        index = IndexInputs(q, None, weights * scale, self.out.group)
        return EntryInputs(inputs, compression, index, self.index_compressor.of(begins))
