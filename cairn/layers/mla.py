"""Multi-head latent attention in absorbed form, and the lightning indexer (DeepSeek-V2 report,
section 2.1; DeepSeek-V3.2 report, section 2.1).

Shapes: T tokens, H heads, r latent, dn and dr head sizes without and with position, dv of values;
Hi heads of the indexer, D their size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cairn import ops
from cairn.attention.inputs import IndexInputs, MlaInputs
from cairn.attention.step import BoundLayer
from cairn.layers.linear import PLAIN, Linear
from cairn.layers.norm import LayerNorm, RMSNorm
from cairn.layers.residual import Delta, Hidden, Product
from cairn.layers.rotary import Angles, Rotary
from cairn.layers.schemes.base import Rows, Scheme
from cairn.layers.weight import Source, Weight
from cairn.specs.mla import IndexerSpec, MlaSpec


class Indexer(nn.Module):
    """Queries, key and head weights that score every earlier token (report, equation 1).

    Args:
        spec: heads, and how many tokens are selected.
        hidden: width of the residual stream.
        q_lora_rank: width of the latent of queries.
        rotary: of the first dimensions.
        dtype: of activations.
        scheme: how matrices are kept, but for that of the head weights.
    """

    def __init__(
        self,
        spec: IndexerSpec,
        hidden: int,
        q_lora_rank: int,
        rotary: Rotary,
        dtype: torch.dtype,
        scheme: Scheme = PLAIN,
    ) -> None:
        super().__init__()
        self.heads, self.rotary = spec.num_heads, rotary
        self.scale = (spec.num_heads * spec.head_dim) ** -0.5
        queries = [Rows("wq_b", spec.num_heads * spec.head_dim)]
        self.wq_b = Linear(q_lora_rank, queries, dtype=dtype, scheme=scheme)
        self.wk = Linear(hidden, [Rows("wk", spec.head_dim)], dtype=dtype, scheme=scheme)
        self.k_norm = LayerNorm(spec.head_dim, spec.eps, dtype=dtype)
        matrix = torch.empty(spec.num_heads, hidden, dtype=dtype)
        self.head_weights = nn.Parameter(matrix, requires_grad=False)

    def weights(self, source: Source) -> list[Weight]:
        """wq_b, wk, k_norm, weights_proj."""
        name, shape = source.name("weights_proj.weight"), tuple(self.head_weights.shape)
        return [
            *self.wq_b.weights(source),
            *self.wk.weights(source),
            *self.k_norm.weights(source, "k_norm"),
            Weight(name, shape, self.head_weights),
        ]

    def forward(self, x: Tensor, q_latent: Tensor, angles: Angles) -> IndexInputs:
        """x [T, hidden] after the layer's norm, q_latent [T, q_lora_rank] -> what scores tokens."""
        q = self.wq_b(q_latent).unflatten(-1, (self.heads, -1))
        k = self.k_norm(self.wk(x))
        self.rotary.rotate(angles.index, q, k.unsqueeze(1), angles.of(self.rotary))
        # Summed and kept in float32: what a shorter dtype rounds away decides what is selected.
        weights = ops.linear(x, self.head_weights, dtype=torch.float32)
        return IndexInputs(q, k, weights * self.scale)


class MlaAttention(nn.Module):
    """Self-attention of one layer.

    Keys and values of heads are never made: what makes keys of latents, W_uk, is applied to
    queries, and what makes values, W_uv, to what attention gives of latents.

    Args:
        spec: sizes, rotary, and the indexer if it has one.
        hidden: width of the residual stream.
        rotary: of queries and keys.
        index_rotary: of the indexer; None without one.
        dtype: of activations.
        scheme: how matrices are kept.
    """

    def __init__(
        self,
        spec: MlaSpec,
        hidden: int,
        rotary: Rotary,
        index_rotary: Rotary | None,
        dtype: torch.dtype,
        scheme: Scheme = PLAIN,
    ) -> None:
        super().__init__()
        self.spec, self.rotary = spec, rotary
        q_rank, rank, heads = spec.q_lora_rank, spec.kv_lora_rank, spec.num_heads
        self.widths = [q_rank, rank, spec.rope_dim]
        down = [Rows("q_a_proj", q_rank), Rows("kv_a_proj_with_mqa", spec.record_dim)]
        self.down = Linear(hidden, down, spec.bias, dtype=dtype, scheme=scheme)
        self.q_norm = RMSNorm(q_rank, spec.latent_eps, dtype=dtype)
        self.kv_norm = RMSNorm(rank, spec.latent_eps, dtype=dtype)
        up = [Rows("q_b_proj", heads * (spec.nope_dim + spec.rope_dim))]
        self.q_up = Linear(q_rank, up, dtype=dtype, scheme=scheme)
        # Its halves are applied apart, head by head: no scheme multiplies so.
        up = [Rows("kv_b_proj", heads * (spec.nope_dim + spec.value_dim))]
        self.kv_up = Linear(rank, up, dtype=dtype, scheme=scheme.unpacked)
        out = [Rows("o_proj", hidden)]
        self.out = Linear(heads * spec.value_dim, out, spec.bias, dtype=dtype, scheme=scheme)
        self.indexer: Indexer | None = None
        if spec.indexer is not None and index_rotary is not None:
            self.indexer = Indexer(spec.indexer, hidden, q_rank, index_rotary, dtype, scheme)

    def weights(self, source: Source) -> list[Weight]:
        """Projections, norms of latents, and indexer.*."""
        found = [
            weight
            for linear in (self.down, self.q_up, self.kv_up, self.out)
            for weight in linear.weights(source)
        ]
        found += self.q_norm.weights(source, "q_a_layernorm")
        found += self.kv_norm.weights(source, "kv_a_layernorm")
        if self.indexer is not None:
            found += self.indexer.weights(source.within("indexer"))
        return found

    def forward(self, h: Hidden, layer: BoundLayer, angles: Angles) -> Delta:
        """[T, hidden] -> the delta [T, hidden]."""
        x = h.value()
        q_latent, latent, k_pe = self.down(x).split(self.widths, dim=-1)
        q_latent, latent = self.q_norm(q_latent), self.kv_norm(latent)
        w_uk, w_uv = self._up_by_head()
        q_nope, q_pe = self._queries(q_latent)
        rank, heads = self.spec.kv_lora_rank, self.spec.num_heads
        # Products are written where they are read: nothing is joined afterwards.
        q = x.new_empty(len(x), heads, self.spec.record_dim)
        torch.bmm(q_nope.transpose(0, 1), w_uk, out=q[..., :rank].transpose(0, 1))
        rotated = q[..., rank:]
        rotated.copy_(q_pe)
        self.rotary.rotate(angles.index, rotated, k_pe.unsqueeze(1), angles.of(self.rotary))
        index = None if self.indexer is None else self.indexer(x, q_latent, angles)
        o = layer.run(MlaInputs(q, latent, k_pe, index))
        values = x.new_empty(len(x), heads, self.spec.value_dim)
        torch.bmm(o.transpose(0, 1), w_uv.transpose(1, 2), out=values.transpose(0, 1))
        return Product(self.out, values.flatten(1))

    def _queries(self, q_latent: Tensor) -> tuple[Tensor, Tensor]:
        """[T, q_lora_rank] -> queries [T, H, dn] and [T, H, dr], the latter before rotation."""
        heads = self.q_up(q_latent).unflatten(-1, (self.spec.num_heads, -1))
        q_nope, q_pe = heads.split((self.spec.nope_dim, self.spec.rope_dim), dim=-1)
        return q_nope, q_pe

    def _up_by_head(self) -> tuple[Tensor, Tensor]:
        """W_uk [H, dn, r] and W_uv [H, dv, r], views."""
        by_head = self.kv_up.weight.unflatten(0, (self.spec.num_heads, -1))
        w_uk, w_uv = by_head.split((self.spec.nope_dim, self.spec.value_dim), dim=1)
        return w_uk, w_uv
