"""Options of speculative decoding: which drafter, and how many tokens it drafts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

from cairn.errors import BadConfig
from cairn.specs.choice import Notes
from cairn.specs.hils import HilsSpec
from cairn.specs.model import ModelSpec

NGRAM, NEXTN = "NGRAM", "NEXTN"
ALGORITHMS = (NGRAM, NEXTN)
DRAFT_MODELS = ("EAGLE", "EAGLE3", "MEDUSA", "STANDALONE", "DRAFT_MODEL", "MLP_SPECULATOR")
"""Algorithms of other engines that are not supported: each needs a separate draft model."""
DEFAULTS, NGRAM_MATCH = {NGRAM: 8, NEXTN: 1}, (2, 12)
COUNTS = {NGRAM: "speculative_num_draft_tokens", NEXTN: "speculative_num_steps"}
"""Option with the number of drafted tokens, by algorithm."""
NGRAM_WINDOWS = (
    "speculative_ngram_min_match_window_size",
    "speculative_ngram_max_match_window_size",
)
VLLM_WINDOWS = dict(zip(("prompt_lookup_min", "prompt_lookup_max"), NGRAM_WINDOWS, strict=True))
VLLM_COUNT = "num_speculative_tokens"


@dataclass(frozen=True, kw_only=True)
class SpeculativeOptions:
    """User options of speculative decoding, by SGLang's names.

    Attributes:
        speculative_algorithm: "NGRAM" guesses what followed the newest earlier occurrence of the
            last tokens; "NEXTN" asks the model's own draft layer; None: no guesses.
        speculative_num_draft_tokens: of NGRAM, guesses that a row runs at a time; of NEXTN one more
            than its steps, if given.
        speculative_num_steps: of NEXTN, guesses that a row runs at a time.
        speculative_eagle_topk: guesses side by side: 1, a chain. Of NGRAM, each is what followed
            another occurrence; of NEXTN, the likeliest first tokens.
        speculative_ngram_min_match_window_size, speculative_ngram_max_match_window_size: shortest
            and longest run of last tokens that is looked for.
        speculative_config: the same in vLLM's form, a JSON object or its text.
    """

    speculative_algorithm: str | None = field(
        default=None,
        metadata={
            "metavar": "NAME",
            "help": (
                "Speculative decoding: NGRAM (prompt lookup) or NEXTN (the checkpoint's "
                "draft layer).  [default: none]"
            ),
        },
    )
    speculative_num_draft_tokens: int | None = field(
        default=None,
        metadata={"type": int, "help": "Tokens that NGRAM drafts in a step.  [default: 8]"},
    )
    speculative_num_steps: int | None = field(
        default=None,
        metadata={"type": int, "help": "Tokens that NEXTN drafts in a step.  [default: 1]"},
    )
    speculative_eagle_topk: int | None = field(
        default=None,
        metadata={
            "type": int,
            "help": (
                "Number of alternative drafts, which differ in the first token. With NEXTN all but "
                "the first have one token.  [default: 1]"
            ),
        },
    )
    speculative_ngram_min_match_window_size: int | None = field(
        default=None,
        metadata={"type": int, "help": "Minimum length of a match of NGRAM.  [default: 2]"},
    )
    speculative_ngram_max_match_window_size: int | None = field(
        default=None,
        metadata={"type": int, "help": "Maximum length of a match of NGRAM.  [default: 12]"},
    )
    speculative_config: str | dict[str, Any] | None = field(
        default=None,
        metadata={
            "metavar": "JSON",
            "help": "Options of speculative decoding as vLLM's JSON object.",
        },
    )


@dataclass(frozen=True, slots=True)
class Speculation:
    """Resolved options of speculative decoding.

    Attributes:
        algorithm: one of ALGORITHMS.
        drafts: guesses of a row at a time.
        match: shortest and longest run of last tokens that NGRAM looks for.
        branches: guesses of a row side by side.
    """

    algorithm: str
    drafts: int
    match: tuple[int, int] = NGRAM_MATCH
    branches: int = 1


def speculative_options() -> tuple[Field[Any], ...]:
    """The fields of `SpeculativeOptions`; their metadata says what a command line needs of them."""
    return fields(SpeculativeOptions)


def resolve_speculation(
    options: SpeculativeOptions, model: ModelSpec, notes: Notes
) -> Speculation | None:
    """What the options mean for this model, the options of its mixers applied; None: no guesses.

    Raises:
        BadConfig: an unknown algorithm, a number out of range, options without their algorithm, or
            more guesses than the model's windows allow.
    """
    given = _given(options)
    algorithm = given.pop("speculative_algorithm", None)
    if algorithm is None:
        for name, value in given.items():
            raise BadConfig(
                f"{name} is {value!r}, but no speculative_algorithm is given",
                "Give --speculative-algorithm too",
            )
        return None
    _check_algorithm(algorithm, model)
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise BadConfig(f"{name} must be a positive integer, not {value!r}")
    drafts = given.pop(COUNTS[algorithm], None)
    if drafts is None:
        drafts = min(DEFAULTS[algorithm], most_drafts(model))
        notes.chose(COUNTS[algorithm], drafts, f"the default of {algorithm}")
    _check_bound(COUNTS[algorithm], drafts, model)
    if algorithm == NEXTN:
        return Speculation(algorithm, drafts, branches=_width(given, drafts))
    return Speculation(algorithm, drafts, _match(given), given.get("speculative_eagle_topk", 1))


def _match(given: Mapping[str, int]) -> tuple[int, int]:
    """Shortest and longest match of NGRAM."""
    if "speculative_num_steps" in given:
        steps = given["speculative_num_steps"]
        raise BadConfig(
            f"speculative_num_steps is {steps}, but NGRAM has no such option",
            "Use --speculative-num-draft-tokens",
        )
    low = given.get(NGRAM_WINDOWS[0], NGRAM_MATCH[0])
    high = given.get(NGRAM_WINDOWS[1], max(low, NGRAM_MATCH[1]))
    if low > high:
        raise BadConfig(
            f"{NGRAM_WINDOWS[0]} is {low}, but the longest match is {high} ({NGRAM_WINDOWS[1]})",
            "Give a shortest match that is no longer than the longest",
        )
    return low, high


def _width(given: Mapping[str, int], drafts: int) -> int:
    """Guesses of NEXTN side by side. Options that it does not use are refused."""
    width = given.get("speculative_eagle_topk", 1)
    nodes = {"speculative_num_draft_tokens": drafts + width, "speculative_eagle_topk": width}
    for name, value in given.items():
        if name not in nodes:
            raise BadConfig(f"{name} is {value}, but NEXTN has no such option", "Leave it out")
        if value != nodes[name]:
            raise BadConfig(
                f"{name} is {value}, but {drafts} guesses of NEXTN behind the last token, {width} "
                f"of them side by side, make {nodes[name]} tokens",
                "Use --speculative-num-steps for the number of guesses",
            )
    return width


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


def _check_bound(name: str, drafts: int, model: ModelSpec) -> None:
    most = most_drafts(model)
    if drafts <= most:
        return
    why = f"its longest sequence has {model.max_model_len} tokens"
    if model.page_size is not None and most < model.max_model_len:
        window = min(m.local_window for m in model.mixers if isinstance(m, HilsSpec) and m.selects)
        size = model.page_size
        why = f"k + ceil(k / {size - 1}) must stay below its window of {window} slots"
    raise BadConfig(
        f"{name} is {drafts}, but this model takes at most {most}: {why}",
        f"Use {most} or less" if most else "Leave the guesses out",
    )


def _given(options: SpeculativeOptions) -> dict[str, Any]:
    """The user's options, with vLLM's JSON translated."""
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
            raise BadConfig(f"speculative_config is not JSON: {error}") from None
    if not isinstance(config, Mapping):
        raise BadConfig(f"speculative_config must be a JSON object, not {config!r}")
    known = ("method", VLLM_COUNT, *VLLM_WINDOWS)
    for name, value in config.items():
        if name not in known and value is not None:
            raise BadConfig(
                f"speculative_config has {name}: {value!r}, which is not supported",
                f"Known: {', '.join(known)}",
            )
    method = config.get("method")
    if method is None:
        raise BadConfig("speculative_config names no method", 'Write "method": "ngram"')
    method = str(method).upper()
    # One name for each family that has such a layer: deepseek_mtp, qwen3_next_mtp and so on.
    algorithm = NEXTN if method.endswith("MTP") else method
    count = COUNTS.get(algorithm, COUNTS[NGRAM])
    names = {"method": "speculative_algorithm", VLLM_COUNT: count, **VLLM_WINDOWS}
    said = {**config, "method": algorithm}
    return {own: said[name] for name, own in names.items() if said.get(name) is not None}


def _check_algorithm(algorithm: object, model: ModelSpec) -> None:
    if algorithm == NEXTN and model.draft_layer is None:
        raise BadConfig(
            "speculative_algorithm is NEXTN, but this model has no draft layer of its own",
            "Use NGRAM",
        )
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
