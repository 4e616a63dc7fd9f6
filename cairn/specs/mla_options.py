"""Options of latent attention."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from cairn.errors import BadConfig
from cairn.specs.mla import MlaSpec
from cairn.specs.model import LayerSpec, ModelSpec


@dataclass(frozen=True, kw_only=True)
class MlaOptions:
    """Options of latent attention.

    Attributes:
        indexer_stream: "second": in CUDA graphs of decode steps the indexer runs on a second
            stream, concurrently with work that does not depend on it; "same": before that work.
    """

    indexer_stream: str = field(
        default="same",
        metadata={
            "help": (
                "CUDA stream of the indexer of sparse attention in graphs of decode steps: second "
                "runs it concurrently with work that does not depend on it.  [default: same]"
            ),
            "choices": ("same", "second"),
        },
    )


def resolve_mla(model: ModelSpec, options: MlaOptions) -> ModelSpec:
    """The model with these options applied to its layers.

    Raises:
        BadConfig: no layer has an indexer.
    """
    if options.indexer_stream == "same":
        return model
    layers = [_beside(layer) for layer in model.layers]
    if layers == list(model.layers):
        raise BadConfig(
            f"indexer_stream is {options.indexer_stream!r}, but no layer of latent attention has "
            "an indexer",
            "Leave --indexer-stream out",
        )
    return replace(model, layers=tuple(layers))


def _beside(layer: LayerSpec) -> LayerSpec:
    mixer = layer.mixer
    if not isinstance(mixer, MlaSpec) or mixer.indexer is None:
        return layer
    indexer = replace(mixer.indexer, second_stream=True)
    return replace(layer, mixer=replace(mixer, indexer=indexer))
