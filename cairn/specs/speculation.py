"""Options of speculative decoding: how next tokens are guessed, and how many at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

from cairn.errors import BadConfig
from cairn.specs.choice import Notes
from cairn.specs.hils import HilsSpec
from cairn.specs.model import ModelSpec

NGRAM = "NGRAM"
ALGORITHMS = (NGRAM,)
DRAFT_MODELS = ("EAGLE", "EAGLE3", "MEDUSA", "STANDALONE", "DRAFT_MODEL", "MLP_SPECULATOR")
"""What other engines have and this one does not: each needs weights beside the model's."""
NGRAM_DRAFTS, NGRAM_MATCH = 8, (2, 12)
VLLM_NAMES = {
    "num_speculative_tokens": "speculative_num_draft_tokens",
    "prompt_lookup_min": "speculative_ngram_min_match_window_size",
    "prompt_lookup_max": "speculative_ngram_max_match_window_size",
}
VLLM_METHODS = {"ngram": NGRAM}


@dataclass(frozen=True, kw_only=True)
class SpeculativeOptions:
    """What a user may ask of speculative decoding; the names are SGLang's.

    Attributes:
        speculative_algorithm: "NGRAM" guesses what followed the newest earlier occurrence of the
            last tokens; None: no guesses.
        speculative_num_draft_tokens: guesses that a row runs at a time.
        speculative_ngram_min_match_window_size, speculative_ngram_max_match_window_size: shortest
            and longest run of last tokens that is looked for.
        speculative_config: the same in vLLM's form, a JSON object or its text.
    """

    speculative_algorithm: str | None = field(
        default=None, metadata={"metavar": "NAME", "help": "Guess next tokens: NGRAM."}
    )
    speculative_num_draft_tokens: int | None = field(
        default=None, metadata={"type": int, "help": "Guesses of a row at a time.  [default: 8]"}
    )
    speculative_ngram_min_match_window_size: int | None = field(
        default=None, metadata={"type": int, "help": "Shortest match of NGRAM.  [default: 2]"}
    )
    speculative_ngram_max_match_window_size: int | None = field(
        default=None, metadata={"type": int, "help": "Longest match of NGRAM.  [default: 12]"}
    )
    speculative_config: str | dict[str, Any] | None = field(
        default=None, metadata={"metavar": "JSON", "help": "The same in vLLM's form."}
    )


@dataclass(frozen=True, slots=True)
class Speculation:
    """How next tokens are guessed.

    Attributes:
        algorithm: one of ALGORITHMS.
        drafts: guesses of a row at a time.
        match: shortest and longest run of last tokens that NGRAM looks for.
    """

    algorithm: str
    drafts: int
    match: tuple[int, int] = NGRAM_MATCH


def speculative_options() -> tuple[Field[Any], ...]:
    """The fields of `SpeculativeOptions`; their metadata says what a command line needs of them."""
    return fields(SpeculativeOptions)


def resolve_speculation(
    options: SpeculativeOptions, model: ModelSpec, notes: Notes
) -> Speculation | None:
    """What the options mean for this model, the options of its mixers applied; None: no guesses.

    Raises:
        BadConfig: an algorithm that is not there, a number out of range, options without their
            algorithm, or more guesses than the model's windows allow.
    """
    given = _given(options)
    algorithm = given.pop("speculative_algorithm", None)
    if algorithm is None:
        for name, value in given.items():
            raise BadConfig(
                f"{name} is {value!r}, but no speculative_algorithm is given",
                "Give --speculative-algorithm NGRAM too",
            )
        return None
    _check_algorithm(algorithm)
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise BadConfig(f"{name} must be a positive integer, not {value!r}")
    drafts = given.get("speculative_num_draft_tokens")
    if drafts is None:
        drafts = min(NGRAM_DRAFTS, most_drafts(model))
        notes.chose("speculative_num_draft_tokens", drafts, f"the default of {algorithm}")
    _check_bound(drafts, model)
    low, high = NGRAM_MATCH
    low = given.get("speculative_ngram_min_match_window_size", low)
    high = given.get("speculative_ngram_max_match_window_size", max(low, high))
    if low > high:
        raise BadConfig(
            f"speculative_ngram_min_match_window_size is {low}, but the longest match is {high} "
            "(speculative_ngram_max_match_window_size)",
            "Give a shortest match that is no longer than the longest",
        )
    return Speculation(algorithm, drafts, (low, high))


def most_drafts(model: ModelSpec) -> int:
    """The most guesses k of a row at a time: k + ceil(k / (S - 1)) < W for pages of S slots and a
    window of W slots in each layer that selects pages. A page whose landmark stands behind a guess
    is then no candidate before that landmark has been written for good.
    """
    windows = [m.local_window for m in model.mixers if isinstance(m, HilsSpec) and m.selects]
    if not windows or model.page_size is None:
        return model.max_model_len
    window, tokens = min(windows), model.page_size - 1
    drafts = max(0, (window - 1) * tokens // model.page_size)
    while _reach(drafts + 1, tokens) < window:
        drafts += 1
    while drafts and _reach(drafts, tokens) >= window:
        drafts -= 1
    return drafts


def _reach(drafts: int, tokens: int) -> int:
    """Slots of so many guesses, landmarks included, with so many tokens a page."""
    return drafts - -drafts // tokens if tokens else 2 * drafts


def _check_bound(drafts: int, model: ModelSpec) -> None:
    most = most_drafts(model)
    if drafts <= most:
        return
    why = f"its longest sequence has {model.max_model_len} tokens"
    if model.page_size is not None and most < model.max_model_len:
        window = min(m.local_window for m in model.mixers if isinstance(m, HilsSpec) and m.selects)
        size = model.page_size
        why = f"k + ceil(k / {size - 1}) must stay below its window of {window} slots"
    raise BadConfig(
        f"speculative_num_draft_tokens is {drafts}, but this model takes at most {most}: {why}",
        f"Use --speculative-num-draft-tokens {most} or less" if most else "Leave the guesses out",
    )


def _given(options: SpeculativeOptions) -> dict[str, Any]:
    """What the user said, vLLM's form translated."""
    given = {f.name: getattr(options, f.name) for f in speculative_options()}
    given = {name: value for name, value in given.items() if value is not None}
    config = given.pop("speculative_config", None)
    if config is None:
        return given
    for name, value in _translated(config).items():
        if given.setdefault(name, value) != value:
            raise BadConfig(
                f"{name} is {given[name]!r}, but speculative_config says {value!r}",
                "Say it once",
            )
    return given


def _translated(config: object) -> dict[str, Any]:
    """vLLM's `--speculative-config` by our names."""
    if isinstance(config, str):
        try:
            config = json.loads(config)
        except ValueError as error:
            raise BadConfig(f"speculative_config is no JSON: {error}") from None
    if not isinstance(config, Mapping):
        raise BadConfig(f"speculative_config must be a JSON object, not {config!r}")
    known = ("method", *VLLM_NAMES)
    for name, value in config.items():
        if name not in known and value is not None:
            raise BadConfig(
                f"speculative_config has {name}: {value!r}, which is not supported",
                f"Known: {', '.join(known)}",
            )
    method = config.get("method")
    if method is None:
        raise BadConfig("speculative_config names no method", 'Write "method": "ngram"')
    found = {"speculative_algorithm": VLLM_METHODS.get(str(method), str(method).upper())}
    found |= {own: config[name] for name, own in VLLM_NAMES.items() if config.get(name) is not None}
    return found


def _check_algorithm(algorithm: object) -> None:
    if algorithm in ALGORITHMS:
        return
    hint = f"Use {' or '.join(ALGORITHMS)}"
    if str(algorithm).upper() in DRAFT_MODELS:
        raise BadConfig(
            f"speculative_algorithm is {algorithm!r}: draft models with weights of their own are "
            "not supported",
            hint,
        )
    raise BadConfig(f"speculative_algorithm is {algorithm!r}", hint)
