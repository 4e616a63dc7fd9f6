"""Multi-head latent attention in absorbed form, and the lightning indexer (DeepSeek-V2 report,
section 2.1; DeepSeek-V3.2 report, section 2.1).

Shapes: T tokens, H heads, r latent, dn and dr head sizes without and with position, dv of values;
Hi heads of the indexer, D their size.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from cairn import ops
from cairn.attention.inputs import IndexInputs, MlaInputs
from cairn.attention.step import BoundLayer
from cairn.distributed.groups import ALONE, Group
from cairn.layers.linear import PLAIN, Linear
from cairn.layers.norm import LayerNorm, RMSNorm
from cairn.layers.residual import Delta, Hidden, Product
from cairn.layers.rotary import Angles, Rotary
from cairn.layers.schemes.base import Rows, Scheme
from cairn.layers.weight import Source, Weight
from cairn.specs.mla import IndexerSpec, MlaSpec


class Indexer(nn.Module):
    """Weights of the heads that score every earlier token (report, equation 1), and the norm of its
    keys; its queries and keys are parts of the attention layer's projections.

    Args:
        spec: heads, and how many tokens are selected.
        hidden: width of the residual stream.
        rotary: of the first dimensions.
        dtype: of activations.
    """

    def __init__(self, spec: IndexerSpec, hidden: int, rotary: Rotary, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.rotary = spec.num_heads, rotary
        self.scale = (spec.num_heads * spec.head_dim) ** -0.5
        self.k_norm = LayerNorm(spec.head_dim, spec.eps, dtype=dtype)
        matrix = torch.empty(spec.num_heads, hidden, dtype=dtype)
        self.head_weights = nn.Parameter(matrix, requires_grad=False)

    def weights(self, source: Source) -> list[Weight]:
        """k_norm, weights_proj."""
        name, shape = source.name("weights_proj.weight"), tuple(self.head_weights.shape)
        return [
            *self.k_norm.weights(source, "k_norm"),
            Weight(name, shape, self.head_weights),
        ]

    def of_heads(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> weights of heads [T, Hi] float32, without their constant factor.

        Accumulated and stored in float32: rounding to a shorter dtype would change the selection.
        """
        return ops.linear(x, self.head_weights, dtype=torch.float32)


class MlaAttention(nn.Module):
    """Self-attention of one layer.

    Absorbed form: keys and values of heads are never computed. W_uk (latent to key) is applied to
    the queries, W_uv (latent to value) to the output of attention over latents.

    Args:
        spec: sizes, rotary, and the indexer if it has one.
        hidden: width of the residual stream.
        rotary: of queries and keys.
        index_rotary: of the indexer; None without one.
        dtype: of activations.
        scheme: storage of the weight matrices.
        group: tensor-parallel ranks, which divide the heads; `spec` has one rank's share. Latents
            and the indexer are replicated.
    """

    def __init__(
        self,
        spec: MlaSpec,
        hidden: int,
        rotary: Rotary,
        index_rotary: Rotary | None,
        dtype: torch.dtype,
        scheme: Scheme = PLAIN,
        group: Group = ALONE,
    ) -> None:
        super().__init__()
        self.spec, self.rotary = spec, rotary
        q_rank, rank, heads = spec.q_lora_rank, spec.kv_lora_rank, spec.num_heads
        down = [Rows("q_a_proj", q_rank), Rows("kv_a_proj_with_mqa", spec.record_dim)]
        self.index_dim = 0
        self.index_key: Linear | None = None
        if spec.indexer is not None:
            key = [Rows("indexer.wk", spec.indexer.head_dim)]
            if spec.bias:
                # The joint down projection has a bias and the index key has none, so that is a
                # separate matrix.
                self.index_key = Linear(hidden, key, dtype=dtype, scheme=scheme)
            else:
                self.index_dim, down = spec.indexer.head_dim, key + down
        self.down = Linear(hidden, down, spec.bias, dtype=dtype, scheme=scheme)
        self.q_norm = RMSNorm(q_rank, spec.latent_eps, dtype=dtype)
        self.kv_norm = RMSNorm(rank, spec.latent_eps, dtype=dtype)
        up = [Rows("q_b_proj", heads * (spec.nope_dim + spec.rope_dim))]
        if spec.indexer is not None:
            # Both read the same latent, so they are one matrix product.
            up.append(Rows("indexer.wq_b", spec.indexer.num_heads * spec.indexer.head_dim))
        self.q_up = Linear(q_rank, up, dtype=dtype, scheme=scheme)
        # Kept unquantised: W_uk and W_uv are applied separately for each head.
        up = [Rows("kv_b_proj", heads * (spec.nope_dim + spec.value_dim))]
        self.kv_up = Linear(rank, up, dtype=dtype, scheme=scheme.unpacked)
        out = [Rows("o_proj", hidden)]
        self.out = Linear(
            heads * spec.value_dim, out, spec.bias, dtype=dtype, scheme=scheme, group=group
        )
        self.indexer: Indexer | None = None
        if spec.indexer is not None and index_rotary is not None:
            self.indexer = Indexer(spec.indexer, hidden, index_rotary, dtype)

    def weights(self, source: Source) -> list[Weight]:
        """Projections, norms of latents, and indexer.*."""
        found = [
            weight
            for linear in (self.down, self.index_key, self.q_up, self.kv_up, self.out)
            if linear is not None
            for weight in linear.weights(source)
        ]
        found += self.q_norm.weights(source, "q_a_layernorm")
        found += self.kv_norm.weights(source, "kv_a_layernorm")
        if self.indexer is not None:
            found += self.indexer.weights(source.within("indexer"))
        return found

    def forward(self, h: Hidden, layer: BoundLayer, angles: Angles) -> Delta:
        """[T, hidden] -> the delta [T, hidden]."""
        x, spec, own = h.value(), self.spec, self.indexer
        w_uk, w_uv = self._up_by_head()
        turning = angles.of(self.rotary), None if own is None else angles.of(own.rotary)
        layouts = self._layouts()
        k_norm, down = None if own is None else own.k_norm, self.down(x)
        key = down[:, : self.index_dim] if self.index_dim else None
        if self.index_key is not None:
            key = self.index_key(x)
        q_latent, latent, k_pe, k = ops.latent_norm_rope(
            down[:, self.index_dim :],
            key,
            self.q_norm.weight,
            self.kv_norm.weight,
            None if k_norm is None else k_norm.weight,
            None if k_norm is None else k_norm.bias,
            *turning,
            eps=spec.latent_eps,
            key_eps=spec.latent_eps if k_norm is None else k_norm.eps,
            interleaved=layouts[0],
            index_interleaved=layouts[1],
        )
        projected = self.q_up(q_latent)
        # Products and rotations write to parts of one tensor, so no concatenation is needed.
        q = x.new_empty(len(x), spec.num_heads, spec.record_dim)
        nope = projected[:, : spec.num_heads * (spec.nope_dim + spec.rope_dim)]
        nope = nope.unflatten(1, (spec.num_heads, -1))[..., : spec.nope_dim]
        latent_part = q[..., : spec.kv_lora_rank].transpose(0, 1)
        weights, factor = (None, 1.0) if own is None else (own.of_heads(x), own.scale)
        index_q, weights = ops.latent_query_rope(
            projected, q, weights, *turning, spec.nope_dim, factor, *layouts
        )
        index = None if own is None else IndexInputs(index_q, k, weights, self.out.group)
        absorb = functools.partial(torch.bmm, nope.transpose(0, 1), w_uk, out=latent_part)
        o = layer.run(MlaInputs(q, latent, k_pe, index, absorb))
        values = x.new_empty(len(x), spec.num_heads, spec.value_dim)
        torch.bmm(o.transpose(0, 1), w_uv.transpose(1, 2), out=values.transpose(0, 1))
        return Product(self.out, values.flatten(1))

    def _layouts(self) -> tuple[bool, bool]:
        """Whether rotary pairs are interleaved, for the heads and for the indexer."""
        own = self.indexer
        return self.rotary.spec.interleaved, own is not None and own.rotary.spec.interleaved

    def _up_by_head(self) -> tuple[Tensor, Tensor]:
        """W_uk [H, dn, r] and W_uv [H, dv, r], views."""
        by_head = self.kv_up.weight.unflatten(0, (self.spec.num_heads, -1))
        w_uk, w_uv = by_head.split((self.spec.nope_dim, self.spec.value_dim), dim=1)
        return w_uk, w_uv
