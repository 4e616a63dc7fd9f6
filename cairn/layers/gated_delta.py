"""Gated delta net: projections around a convolution and a recurrent state (Yang et al. 2024)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cairn import ops
from cairn.attention.inputs import GatedDeltaInputs
from cairn.attention.step import BoundLayer
from cairn.distributed.groups import ALONE, Group
from cairn.layers.linear import PLAIN, Linear
from cairn.layers.norm import RMSNorm
from cairn.layers.residual import Delta, Hidden, Product
from cairn.layers.rotary import Angles
from cairn.layers.schemes.base import Rows, Scheme
from cairn.layers.weight import Source, Weight
from cairn.specs.gated_delta import GatedDeltaSpec


class GatedDeltaNet(nn.Module):
    """The mixer of one recurrent layer.

    All projections of the layer's input are one matrix with the rows [all q | all k | all v |
    all z | all b | all a]. q, k and v go through the convolution; z gates the output; b and a give
    the write strength and the decay.

    Args:
        spec: heads and widths.
        hidden: width of the residual stream.
        dtype: of activations.
        scheme: storage of the weight matrices.
        group: tensor-parallel ranks, which divide the heads; `spec` has one rank's share.
    """

    def __init__(
        self,
        spec: GatedDeltaSpec,
        hidden: int,
        dtype: torch.dtype,
        scheme: Scheme = PLAIN,
        group: Group = ALONE,
    ) -> None:
        super().__init__()
        self.conv_parts = spec.conv_parts
        self.heads, self.value_dim = spec.value_heads, spec.value_dim
        values = spec.value_heads * spec.value_dim
        self.widths = (spec.conv_channels, values, spec.value_heads, spec.value_heads)
        parts = grouped_parts(spec) if spec.grouped else separate_parts(spec)
        self.inputs = Linear(hidden, parts, dtype=dtype, scheme=scheme)
        out = [Rows("out_proj", hidden)]
        self.out = Linear(values, out, dtype=dtype, scheme=scheme, group=group)
        self.norm = RMSNorm(spec.value_dim, spec.eps, dtype=dtype)
        self.conv = _parameter(spec.conv_channels, spec.conv_kernel, dtype=dtype)
        # Kept in float32, as in training: the decay is an exponential of both.
        self.a_log = _parameter(spec.value_heads, dtype=torch.float32)
        self.dt_bias = _parameter(spec.value_heads, dtype=torch.float32)

    def weights(self, source: Source) -> list[Weight]:
        """Projections, conv1d, A_log, dt_bias and norm."""
        channels, width = self.conv.shape
        return [
            *self.inputs.weights(source),
            *self.out.weights(source),
            *self.norm.weights(source, "norm"),
            Weight(
                source.name("conv1d.weight"),
                (channels, 1, width),
                self.conv,
                transform=_depthwise,
                pieces=self.conv_parts,
            ),
            Weight(source.name("A_log"), (self.heads,), self.a_log, draw="around_zero"),
            Weight(source.name("dt_bias"), (self.heads,), self.dt_bias, draw="around_one"),
        ]

    def forward(self, h: Hidden, layer: BoundLayer, angles: Angles) -> Delta:
        """[T, hidden] -> the delta [T, hidden]; angles are ignored."""
        qkv, z, b, a = self.inputs(h.x, h.norm).split(self.widths, dim=-1)
        o = layer.run(GatedDeltaInputs(qkv, b, a, self.conv, self.a_log, self.dt_bias))
        gate = z.unflatten(-1, (self.heads, self.value_dim))
        # This norm multiplies by w, not 1 + w as those of the residual stream, and is before the
        # gate.
        o = ops.fused_rmsnorm_gated(o, self.norm.weight, gate, self.norm.eps)
        return Product(self.out, o.flatten(1))


def separate_parts(spec: GatedDeltaSpec) -> list[Rows]:
    """The stored matrices of Qwen3.5: one for each kind of row."""
    heads = spec.value_heads
    return [
        Rows("in_proj_qkv", spec.conv_channels, pieces=spec.conv_parts),
        Rows("in_proj_z", heads * spec.value_dim),
        Rows("in_proj_b", heads),
        Rows("in_proj_a", heads),
    ]


def grouped_parts(spec: GatedDeltaSpec) -> list[Rows]:
    """The stored matrices of Qwen3-Next, with rows grouped by key head: [q | k | v of its value
    heads | z of these] and [b | a] of these. `order` sorts them into [all q | all k | all v |
    all z] and [all b | all a]."""
    each = spec.value_heads // spec.key_heads
    qkvz = (spec.key_dim, spec.key_dim, each * spec.value_dim, each * spec.value_dim)
    parts = (("in_proj_qkvz", qkvz), ("in_proj_ba", (each, each)))
    return [
        Rows(name, spec.key_heads * sum(widths), _by_kind(spec.key_heads, widths))
        for name, widths in parts
    ]


def _by_kind(groups: int, widths: tuple[int, ...]) -> Tensor:
    """Row numbers of all groups sorted by kind; every group has `widths` rows of each kind."""
    # Modules may be built on the meta device, but these numbers are needed.
    row = torch.arange(groups * sum(widths), device="cpu").view(groups, -1)
    return torch.cat([part.flatten() for part in row.split(widths, dim=1)])


def _parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def _depthwise(stored: Tensor) -> Tensor:
    """[C, 1, W], as a library's convolution keeps it, -> [C, W]."""
    return stored.squeeze(1)
