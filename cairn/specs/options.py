"""Options of the mixers: each is declared and resolved in its mixer's file and joined here."""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields
from typing import Any

from cairn.errors import BadConfig
from cairn.specs.backends import DENSE
from cairn.specs.choice import Notes
from cairn.specs.gqa import GqaSpec
from cairn.specs.hils import HilsOptions, HilsSpec, resolve_hils
from cairn.specs.mla_options import MlaOptions, resolve_mla
from cairn.specs.model import ModelSpec

BACKEND_CHOICES = ("auto", *sorted(HilsSpec.ALTERNATIVES))


@dataclass(frozen=True, kw_only=True)
class MixerOptions(HilsOptions, MlaOptions):
    """Options that change how the layers of a model attend.

    Attributes:
        attention_backend: what computes the layers that several backends can compute, or "auto".
    """

    attention_backend: str = field(
        default="auto",
        metadata={
            "help": (
                "What computes the landmark layers: hsa selects pages, window and dense "
                "are for comparison.  [default: auto]"
            ),
            "choices": BACKEND_CHOICES,
        },
    )

    def check(self) -> None:
        """Refuse values that no model takes.

        Raises:
            BadConfig: naming the option.
        """
        for entry in mixer_options():
            value, choices = getattr(self, entry.name), entry.metadata.get("choices")
            if choices and value not in choices:
                raise BadConfig(f"{entry.name} is {value!r}", f"Choose one of {', '.join(choices)}")
        for name in ("hsa_topk", "hsa_window_size"):
            value = getattr(self, name)
            wrong = isinstance(value, bool) or not isinstance(value, int) or value < 1
            if value is not None and wrong:
                raise BadConfig(f"{name} must be a positive integer, not {value!r}")


def mixer_options() -> tuple[Field[Any], ...]:
    """The fields of `MixerOptions`; their metadata says what a command line needs of them."""
    return fields(MixerOptions)


def resolve_mixers(model: ModelSpec, options: MixerOptions, notes: Notes) -> ModelSpec:
    """The model with the user's options applied to its layers.

    Raises:
        BadConfig: an option that is impossible for this model.
    """
    backend = _resolve_backend(model, options.attention_backend, notes)
    return resolve_mla(resolve_hils(model, options, backend, notes), options)


def _resolve_backend(model: ModelSpec, asked: str, notes: Notes) -> str:
    """What computes the layers that several backends can compute."""
    open_layers = [mixer for mixer in model.mixers if isinstance(mixer, HilsSpec)]
    if open_layers:
        trained = open_layers[0].ALTERNATIVES[0]
        reason = f"{len(open_layers)} of {model.num_layers} layers select pages by landmarks"
    else:
        attends = any(isinstance(mixer, GqaSpec) for mixer in model.mixers)
        trained = DENSE if attends else model.mixers[0].backend
        reason = "no layer of the model has landmarks"
        if not attends:
            reason = "nothing else computes the model's layers"
    if asked == "auto":
        notes.chose("attention_backend", trained, reason)
    elif asked != trained and not open_layers:
        raise BadConfig(
            f"attention_backend is {asked!r}, but no layer of this model was trained for it",
            f"Use --attention-backend {trained} or auto",
        )
    elif asked != trained:
        notes.warn(
            f"attention_backend={asked} contradicts the trained model ({trained}): "
            "its landmark layers compute something else than they learned"
        )
    return trained if asked == "auto" else asked
