"""Modules of mixers and feed-forward layers by their specs. To add one, add a file in this folder
and a line in the tables below."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from cairn.attention.step import BoundLayer
from cairn.distributed.groups import ALONE, Group
from cairn.distributed.rounds import Rounds
from cairn.layers.compressed import CompressedAttention
from cairn.layers.gated_delta import GatedDeltaNet
from cairn.layers.gqa import GqaAttention
from cairn.layers.hils import HilsAttention
from cairn.layers.mla import MlaAttention
from cairn.layers.mlp import GatedMLP
from cairn.layers.moe import MixtureOfExperts
from cairn.layers.residual import Delta, Hidden
from cairn.layers.rotary import Angles, Rotary
from cairn.layers.schemes.base import Scheme
from cairn.layers.schemes.registry import scheme_within
from cairn.layers.weight import Source, Weight
from cairn.specs.compressed import CompressedSpec
from cairn.specs.ffn import DenseFfn, FfnSpec, MoeFfn
from cairn.specs.gated_delta import GatedDeltaSpec
from cairn.specs.gqa import GqaSpec
from cairn.specs.hils import HilsSpec
from cairn.specs.mla import MlaSpec
from cairn.specs.model import MixerSpec
from cairn.specs.rotary import RotarySpec


class Context(NamedTuple):
    """Arguments for building the modules of a layer.

    Attributes:
        hidden: width of the residual stream.
        dtype: of activations.
        scheme: storage of the weight matrices.
        rotaries: shared by layers with the same rotary embedding.
        group: tensor-parallel ranks; specs have one rank's share.
        rounds: of engines that share experts; None: not shared.
    """

    hidden: int
    dtype: torch.dtype
    scheme: Scheme
    rotaries: dict[RotarySpec, Rotary]
    group: Group = ALONE
    rounds: Rounds | None = None

    def within(self, prefix: str) -> Context:
        """The context of the submodule whose tensors' names begin with the prefix."""
        return self._replace(scheme=scheme_within(self.scheme, prefix))

    def rotary(self, spec: RotarySpec | None) -> Rotary | None:
        """The rotation of a spec; None for None."""
        if spec is None:
            return None
        if spec not in self.rotaries:
            self.rotaries[spec] = Rotary(spec)
        return self.rotaries[spec]


class Mixer(Protocol):
    """A module that mixes the tokens of a sequence."""

    def __call__(self, h: Hidden, layer: BoundLayer, angles: Angles) -> Delta:
        """[T, hidden] -> the delta [T, hidden]."""

    def weights(self, source: Source) -> list[Weight]:
        """Declarations of its tensors."""


class Ffn(Protocol):
    """A module that treats every token separately."""

    def __call__(self, h: Hidden) -> Delta:
        """[T, hidden] -> the delta [T, hidden]."""

    def weights(self, source: Source) -> list[Weight]:
        """Declarations of its tensors."""


def _gqa(spec: GqaSpec, c: Context) -> nn.Module:
    return GqaAttention(spec, c.hidden, c.rotary(spec.rotary), c.dtype, c.scheme, c.group)


def _hils(spec: HilsSpec, c: Context) -> nn.Module:
    return HilsAttention(spec, c.hidden, c.rotary(spec.rotary), c.dtype, c.scheme, c.group)


def _gated_delta(spec: GatedDeltaSpec, c: Context) -> nn.Module:
    return GatedDeltaNet(spec, c.hidden, c.dtype, c.scheme, c.group)


def _mla(spec: MlaSpec, c: Context) -> nn.Module:
    rotary = c.rotary(spec.rotary)
    assert rotary is not None
    indexer = None if spec.indexer is None else c.rotary(spec.indexer.rotary)
    return MlaAttention(spec, c.hidden, rotary, indexer, c.dtype, c.scheme, c.group)


def _compressed(spec: CompressedSpec, c: Context) -> nn.Module:
    rotary = c.rotary(spec.rotary)
    assert rotary is not None
    return CompressedAttention(spec, c.hidden, rotary, c.dtype, c.scheme, c.group)


def _dense(spec: DenseFfn, c: Context) -> nn.Module:
    return GatedMLP(c.hidden, spec, dtype=c.dtype, scheme=c.scheme, group=c.group)


def _moe(spec: MoeFfn, c: Context) -> nn.Module:
    given = c.group, c.rounds
    return MixtureOfExperts(spec, c.hidden, *given, dtype=c.dtype, scheme=c.scheme)


MIXERS: Mapping[type, Callable[[Any, Context], nn.Module]] = {
    GqaSpec: _gqa,
    HilsSpec: _hils,
    GatedDeltaSpec: _gated_delta,
    MlaSpec: _mla,
    CompressedSpec: _compressed,
}
FFNS: Mapping[type, Callable[[Any, Context], nn.Module]] = {
    DenseFfn: _dense,
    MoeFfn: _moe,
}


def build_mixer(spec: MixerSpec, context: Context) -> nn.Module:
    """The module of a mixer; it is a `Mixer`."""
    return MIXERS[type(spec)](spec, context)


def build_ffn(spec: FfnSpec, context: Context) -> nn.Module:
    """The module of a feed-forward part; it is an `Ffn`."""
    return FFNS[type(spec)](spec, context)
