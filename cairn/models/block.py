"""The block that all models share: a mixer, a feed-forward part and their norms."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from cairn.attention.step import BoundLayer
from cairn.layers.norm import RMSNorm
from cairn.layers.registry import Context, Ffn, Mixer, build_ffn, build_mixer
from cairn.layers.residual import Residual, Site
from cairn.layers.rotary import Angles
from cairn.layers.weight import Source, Weight
from cairn.specs.model import LayerSpec, NormSpec

NORMS = ("mixer_norm", "ffn_norm", "mixer_out_norm", "ffn_out_norm")


class Block(nn.Module):
    """One layer: x += mixer(norm(x)); x += ffn(norm(x)), with norms on the outputs in addition to
    or instead of those on the inputs; with several residual streams each part has a site.

    Args:
        spec: of the layer.
        context: arguments for building its modules.
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
        self.mixer_site: Site | None = None
        self.ffn_site: Site | None = None
        if spec.streams is not None:
            self.mixer_site = Site(spec.streams, context.hidden)
            self.ffn_site = Site(spec.streams, context.hidden)
        self.mixer = build_mixer(spec.mixer, context.within(spec.names.mixer))
        self.ffn = build_ffn(spec.ffn, context.within(spec.names.ffn))

    def weights(self, source: Source) -> list[Weight]:
        """Norms, sites, feed-forward part, mixer."""
        mixer, ffn = cast(Mixer, self.mixer), cast(Ffn, self.ffn)
        norms = [(getattr(self, field), getattr(self.names, field)) for field in NORMS]
        sites = ((self.mixer_site, self.names.mixer_site), (self.ffn_site, self.names.ffn_site))
        return [
            *(w for site, name in sites if site is not None for w in site.weights(source, name)),
            *(w for norm, name in norms if norm is not None for w in norm.weights(source, name)),
            *ffn.weights(source.within(self.names.ffn)),
            *mixer.weights(source.within(self.names.mixer)),
        ]

    def forward(
        self, residual: Residual, layer: BoundLayer, angles: Angles, behind: Block | None
    ) -> None:
        """Run the block on the residual stream; `behind` is the block that reads it next."""
        mixed = self.mixer(residual.read(self.mixer_norm, self.mixer_site), layer, angles)
        residual.add(mixed, next_norm=self.ffn_norm, own_norm=self.mixer_out_norm)
        next_norm = None if behind is None else behind.mixer_norm
        fed = self.ffn(residual.read(self.ffn_norm, self.ffn_site))
        residual.add(fed, next_norm=next_norm, own_norm=self.ffn_out_norm)


def build_norm(spec: NormSpec, width: int, dtype: torch.dtype) -> RMSNorm:
    """A norm of the residual stream."""
    return RMSNorm(width, spec.eps, dtype=dtype, unit_offset=spec.unit_offset)
