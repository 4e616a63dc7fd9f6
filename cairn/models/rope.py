"""Rotary embedding of a config.json: unscaled, or scaled for a longer context."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cairn.models.fields import ConfigFields, refuse, rotated_dims
from cairn.specs.rotary import (
    LinearScaling,
    Llama3Scaling,
    RotarySpec,
    YarnSpec,
    yarn_magnitude,
)

SPELLINGS = ("rope_parameters", "rope_scaling")
LATENT_TYPES = ("default", "yarn")
TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


def latent_rope(
    f: ConfigFields, head_dim: int, theta: float, max_positions: int, interleaved: bool
) -> tuple[RotarySpec, float]:
    """The rotation of latent attention, and m: scores are multiplied by m^2.

    Reads `rope_parameters`, or `rope_theta` and `rope_scaling`, each with `rope_type` or `type`.

    Args:
        f: the config.
        head_dim: dimensions that rotate.
        theta: default of the base.
        max_positions: of the model, which an extension reaches.
        interleaved: pairs are neighbours.

    Raises:
        BadModel: a type that is not supported, a value that is impossible, or spellings that
            contradict each other.
    """
    given, kind, base = _read(f, LATENT_TYPES, theta)
    share = given.pop("partial_rotary_factor", None)
    if share not in (None, 1, 1.0):
        raise refuse(
            f"{_spelling(f)}.partial_rotary_factor",
            share,
            "all rotary dimensions rotate",
            "Write 1",
        )
    spec = RotarySpec("standard", head_dim, base, interleaved=interleaved)
    if kind == "default":
        return spec, 1.0
    part = _Part(f, given)
    yarn, attention, scale_all = _yarn(part, max_positions)
    m = yarn_magnitude(yarn.factor, scale_all) if scale_all else 1.0
    return replace(spec, scaling=yarn, attention_factor=attention), m


def attention_rope(
    f: ConfigFields, head_dim: int, theta: float, max_positions: int
) -> tuple[RotarySpec, int]:
    """The rotation of grouped-query attention, and the longest context in tokens.

    Reads the same fields. `dynamic` changes its base with the length of a sequence, so that keys
    that are cached would be wrong later: up to `max_positions` it is the unscaled rotation, and
    that is the longest context.

    Args:
        f: the config.
        head_dim: d; `partial_rotary_factor` of it rotates.
        theta: default of the base.
        max_positions: max_position_embeddings.

    Raises:
        BadModel: as `latent_rope`.
    """
    given, kind, base = _read(f, TYPES, theta)
    given.pop("partial_rotary_factor", None)
    spec = RotarySpec("standard", rotated_dims(f, head_dim, 1.0), base, rounded=True)
    part = _Part(f, given)
    if kind == "linear":
        return replace(spec, scaling=LinearScaling(part.needed("factor"))), max_positions
    if kind == "llama3":
        return replace(spec, scaling=_llama3(part, max_positions)), max_positions
    if kind == "yarn":
        yarn, attention, _ = _yarn(part, max_positions)
        reach = max(max_positions, int(yarn.factor * yarn.original))
        return replace(spec, scaling=yarn, attention_factor=attention), reach
    return spec, max_positions


def two_ropes(
    f: ConfigFields, head_dim: int, thetas: tuple[float, float], max_positions: int
) -> tuple[RotarySpec, RotarySpec]:
    """The rotations of a model with two: one without scaling, and one for compressed layers, whose
    base is `compress_rope_theta` and which `rope_scaling` extends.

    Reads `rope_theta`, `compress_rope_theta` and `rope_scaling`, or `rope_parameters`, which holds
    either the object of `rope_scaling` or an object for each, `main` and `compress`.

    Args:
        f: the config.
        head_dim: dimensions that rotate, neighbours paired.
        thetas: defaults of the bases.
        max_positions: of the model, which an extension reaches.

    Raises:
        BadModel: as `latent_rope`.
    """
    given = f.config.get("rope_parameters")
    spec = RotarySpec("standard", head_dim, thetas[0], interleaved=True)
    if isinstance(given, dict) and set(given) == {"main", "compress"}:
        f.record("rope_parameters", given, "config")
        own = [
            ConfigFields({"rope_parameters": dict(part or {})})
            for part in (given["main"], given["compress"])
        ]
        first, second = (
            _one_rope(part, replace(spec, theta=theta), max_positions)
            for part, theta in zip(own, thetas, strict=True)
        )
        return first, second
    main = replace(spec, theta=f.number("rope_theta", thetas[0]))
    base = f.number("compress_rope_theta", thetas[1])
    scaling = {k: v for k, v in _parameters(f).items() if k != "rope_theta"}
    alone = ConfigFields({"rope_scaling": scaling})
    return main, _one_rope(alone, replace(spec, theta=base), max_positions)


def _one_rope(f: ConfigFields, spec: RotarySpec, max_positions: int) -> RotarySpec:
    """A rotation from the object that describes it; cos and sin have a factor only where it is
    written."""
    given, kind, base = _read(f, LATENT_TYPES, spec.theta)
    given.pop("partial_rotary_factor", None)
    spec = replace(spec, theta=base)
    if kind == "default":
        return spec
    part = _Part(f, given)
    factor = part.number("attention_factor") or 1.0
    return replace(spec, scaling=_yarn(part, max_positions)[0], attention_factor=factor)


def _read(
    f: ConfigFields, types: tuple[str, ...], theta: float
) -> tuple[dict[str, Any], str, float]:
    """The object that describes a scaling, its type, and the base of the frequencies."""
    given = _parameters(f)
    kind = given.pop("rope_type", None) or given.pop("type", None) or "default"
    given.pop("type", None)
    by_layer = next((key for key, value in given.items() if isinstance(value, dict)), None)
    if by_layer is not None:
        name = f"{_spelling(f)}.{by_layer}"
        raise refuse(
            name, given[by_layer], "one rotary a kind of layer", "Write one for all layers"
        )
    if kind not in types:
        name = _spelling(f)
        raise refuse(
            f"{name}.type", kind, "a rotary that is not supported", f"Known: {', '.join(types)}"
        )
    return given, kind, _theta(f, given, theta)


class _Part:
    """Numbers of the nested object.

    Args:
        f: the config, which records them.
        given: the object.
    """

    def __init__(self, f: ConfigFields, given: dict[str, Any]) -> None:
        self._f, self._name = f, _spelling(f)
        self._nested = ConfigFields({self._full(key): value for key, value in given.items()})

    def _full(self, key: str) -> str:
        return f"{self._name}.{key}"

    def number(self, key: str) -> float | None:
        """A number >= 0; None where it is absent, null or 0."""
        name = self._full(key)
        if not self._nested.config.get(name):
            return None
        value = self._nested.number(name, 0.0)
        self._f.record(name, value, "config")
        return value

    def needed(self, key: str) -> float:
        """A number > 0.

        Raises:
            BadModel: it is absent.
        """
        value = self.number(key)
        if value is None:
            raise refuse(
                self._full(key), None, "this type of rotary needs it", "Write a number > 0"
            )
        return value

    def integer(self, key: str) -> int | None:
        """A positive integer; None where it is absent or null."""
        name = self._full(key)
        value = self._nested.optional_integer(name, None)
        self._f.record(name, value, "config" if value is not None else "default")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        name = self._full(key)
        value = self._nested.flag(name, default)
        self._f.record(name, value, "config" if name in self._nested.config else "default")
        return value


def _yarn(part: _Part, max_positions: int) -> tuple[YarnSpec, float, float | None]:
    """YaRN (Peng et al. 2023): frequencies, the factor of cos and sin, and mscale_all_dim."""
    original = part.integer("original_max_position_embeddings") or max_positions
    factor = part.number("factor") or max_positions / original
    yarn = YarnSpec(
        factor=factor,
        original=original,
        beta_fast=part.number("beta_fast") or 32.0,
        beta_slow=part.number("beta_slow") or 1.0,
        truncate=part.flag("truncate", True),
    )
    scale, scale_all = part.number("mscale"), part.number("mscale_all_dim")
    attention = part.number("attention_factor")
    if attention is None and scale and scale_all:
        attention = yarn_magnitude(factor, scale) / yarn_magnitude(factor, scale_all)
    elif attention is None:
        attention = yarn_magnitude(factor, 1.0)
    return yarn, attention, scale_all


def _llama3(part: _Part, max_positions: int) -> Llama3Scaling:
    """Llama 3.1's blend."""
    low, high = part.number("low_freq_factor") or 1.0, part.number("high_freq_factor") or 4.0
    if low >= high:
        raise refuse("low_freq_factor", low, f"high_freq_factor is {high}", "Write a smaller one")
    original = part.integer("original_max_position_embeddings") or max_positions
    return Llama3Scaling(part.needed("factor"), original, low, high)


def _parameters(f: ConfigFields) -> dict[str, Any]:
    """The value of the spelling that is present; if both are, they must be equal."""
    found: list[dict[str, Any]] = []
    for name in SPELLINGS:
        value = f.config.get(name)
        if value is not None and not isinstance(value, dict):
            raise refuse(name, value, "not an object", f"Write null for {name}")
        f.record(name, value, f.source(name))
        if value:
            found.append(value)
    if len(found) == 2 and any(found[0].get(k, v) != v for k, v in found[1].items()):
        raise refuse("rope_scaling", found[1], "rope_parameters differs", "Write one of them")
    return {k: v for part in reversed(found) for k, v in part.items()}


def _spelling(f: ConfigFields) -> str:
    """The spelling that is used."""
    return next((name for name in SPELLINGS if f.config.get(name)), SPELLINGS[-1])


def _theta(f: ConfigFields, given: dict[str, Any], default: float) -> float:
    """The base, written beside the object or in it."""
    inner = given.pop("rope_theta", None)
    theta = f.number("rope_theta", default)
    if inner is None:
        return theta
    nested = ConfigFields({"rope_theta": inner}).number("rope_theta", default)
    if f.written("rope_theta") and theta != nested:
        raise refuse("rope_theta", theta, f"rope_parameters says {inner}", "Write one of them")
    f.record("rope_theta", nested, f"config ({_spelling(f)})")
    return nested
