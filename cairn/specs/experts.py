"""Options of expert parallelism and of balancing experts (EPLB); names are SGLang's and vLLM's."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from cairn.errors import BadConfig
from cairn.specs.choice import Notes
from cairn.specs.ffn import MoeFfn
from cairn.specs.model import LayerSpec, ModelSpec

TRIVIAL = "trivial"
A2A_BACKENDS = ("none", "deepep")
PLACEMENT = "physical_to_logical_map"
"""Key of a file of expert locations, as SGLang writes it."""
VLLM_KEYS = {
    "num_redundant_experts": "ep_num_redundant_experts",
    "step_interval": "eplb_rebalance_num_iterations",
}
"""Keys of vLLM's --eplb-config that mean one of the options here."""
VLLM_IGNORED = ("window_size", "log_balancedness", "use_async", "policy")


@dataclass(frozen=True, kw_only=True)
class ExpertOptions:
    """User options of a model's experts.

    Attributes:
        enable_expert_parallel: each rank holds some experts whole, instead of a part of each.
        ep_size: ranks or replicas that share the experts: all there are, if given.
        expert_engines: replicas that share them, one of which this engine is; the server sets it.
        enable_eplb: experts are counted, and moved or copied between ranks so that all ranks get
            about as many tokens.
        ep_num_redundant_experts: places for copies of busy experts, in all.
        eplb_rebalance_num_iterations: steps between two placements.
        eplb_rebalance_layers_per_chunk: layers that are placed between two steps.
        init_expert_location: "trivial", or a JSON file with the expert in every place of all ranks,
            for every layer with experts ("physical_to_logical_map").
        moe_a2a_backend: "none"; "deepep" is recognised but not supported.
        eplb_config: the same in vLLM's form, a JSON object or its text.
    """

    enable_expert_parallel: bool = field(
        default=False,
        metadata={
            "flag": True,
            "help": "Expert parallelism: each rank holds some whole experts instead of a part of "
            "each.",
        },
    )
    ep_size: int | None = field(
        default=None,
        metadata={"type": int, "help": "Number of ranks that share the experts.  [default: all]"},
    )
    expert_engines: int = 1
    enable_eplb: bool = field(
        default=False,
        metadata={
            "flag": True,
            "help": "Rebalance experts between ranks by their load (EPLB).",
        },
    )
    ep_num_redundant_experts: int = field(
        default=0,
        metadata={
            "type": int,
            "help": "Total number of additional copies of experts.  [default: 0]",
        },
    )
    eplb_rebalance_num_iterations: int = field(
        default=1000,
        metadata={
            "type": int,
            "help": "Steps between two rebalancings.  [default: 1000]",
        },
    )
    eplb_rebalance_layers_per_chunk: int = field(
        default=4,
        metadata={
            "type": int,
            "help": "Layers to rebalance between two steps.  [default: 4]",
        },
    )
    init_expert_location: str = field(
        default=TRIVIAL,
        metadata={
            "metavar": "FILE",
            "help": "JSON file with the initial placement of experts.  [default: trivial]",
        },
    )
    moe_a2a_backend: str = field(
        default="none",
        metadata={
            "choices": A2A_BACKENDS,
            "help": "All-to-all backend of experts.  [default: none]",
        },
    )
    eplb_config: str | dict[str, Any] | None = field(
        default=None,
        metadata={"metavar": "JSON", "help": "Options of EPLB as vLLM's JSON object."},
    )


@dataclass(frozen=True, slots=True)
class Balance:
    """Schedule of expert rebalancing.

    Attributes:
        every: steps between two placements.
        chunk: layers that are placed between two steps.
    """

    every: int
    chunk: int


def expert_options() -> tuple[Field[Any], ...]:
    """The fields of `ExpertOptions` that a user sets; their metadata says what a command line
    needs."""
    return tuple(field for field in fields(ExpertOptions) if field.metadata)


def resolve_experts(
    options: ExpertOptions, model: ModelSpec, ranks: int, notes: Notes
) -> tuple[ModelSpec, Balance | None]:
    """The model with its experts placed on ranks, and when they are placed anew (None: never).

    Raises:
        BadConfig: a value that is impossible, or that means nothing here.
    """
    options = _with_vllm(options)
    _check(options)
    if not options.enable_expert_parallel:
        asked = {
            "ep_size": options.ep_size not in (None, 1),
            "enable_eplb": options.enable_eplb,
            "ep_num_redundant_experts": options.ep_num_redundant_experts > 0,
        }
        for name in (name for name, given in asked.items() if given):
            raise BadConfig(
                f"{name} is {getattr(options, name)!r}, but experts are not shared out",
                "Give enable_expert_parallel (--enable-expert-parallel) too",
            )
        return model, None
    mixtures = [layer.ffn for layer in _layers(model) if isinstance(layer.ffn, MoeFfn)]
    if not mixtures:
        raise BadConfig("enable_expert_parallel is given, but the model has no experts")
    if options.expert_engines > 1:
        # They have one rank each, see `cairn.engine.placement`.
        ranks = options.expert_engines
        if options.enable_eplb or model.draft is not None:
            what = "enable_eplb" if options.enable_eplb else "speculative_algorithm NEXTN"
            raise BadConfig(
                f"{what} does not go together with experts that several engines share",
                "Leave it out, or use --tensor-parallel-size",
            )
    if options.ep_size not in (None, ranks):
        raise BadConfig(
            f"ep_size is {options.ep_size}, but experts are shared by all ranks, which are {ranks}",
            f"Use {ranks}, or leave it out",
        )
    if ranks == 1:
        notes.warn("enable_expert_parallel changes nothing on one rank")
        return model, None
    placements = _placements(options, mixtures, ranks)
    count = len(placements[0]) // ranks
    notes.chose("experts of a rank", str(count), f"{ranks} ranks share {mixtures[0].experts}")
    balance = None
    if options.enable_eplb:
        every, chunk = (
            options.eplb_rebalance_num_iterations,
            options.eplb_rebalance_layers_per_chunk,
        )
        balance = Balance(every, chunk)
    # Engines each run the shared expert for tokens of their own.
    divided = 1 if options.expert_engines > 1 else ranks
    return _with_places(model, iter(placements), divided), balance


def without_places(model: ModelSpec) -> ModelSpec:
    """The same model without a placement of experts."""
    return _with_places(model, itertools.repeat(()), 1)


def _with_places(model: ModelSpec, placements: Iterator[tuple[int, ...]], ranks: int) -> ModelSpec:
    def placed(layer: LayerSpec) -> LayerSpec:
        ffn = layer.ffn
        if not isinstance(ffn, MoeFfn):
            return layer
        each, rest = divmod(ffn.shared, ffn.intermediate * ranks)
        shared = 0 if rest or ranks == 1 else each
        return replace(layer, ffn=replace(ffn, placement=next(placements), shared_places=shared))

    layers, draft = tuple(map(placed, model.layers)), model.draft
    if draft is not None:
        draft = replace(draft, layer=placed(draft.layer))
    return replace(model, layers=layers, draft=draft)


def _layers(model: ModelSpec) -> tuple[LayerSpec, ...]:
    drafting = () if model.draft is None else (model.draft.layer,)
    return *model.layers, *drafting


def _with_vllm(options: ExpertOptions) -> ExpertOptions:
    """The options with those of vLLM's object in their places."""
    given = options.eplb_config
    if given is None:
        return options
    try:
        found = json.loads(given) if isinstance(given, str) else dict(given)
        unknown = sorted(set(found) - {*VLLM_KEYS, *VLLM_IGNORED})
    except (TypeError, ValueError):
        raise BadConfig(f"eplb_config is {given!r}", "Write a JSON object") from None
    if unknown:
        known = ", ".join((*VLLM_KEYS, *VLLM_IGNORED))
        raise BadConfig(f"eplb_config has {unknown[0]!r}", f"Known: {known}")
    return replace(options, **{ours: found[key] for key, ours in VLLM_KEYS.items() if key in found})


def _check(options: ExpertOptions) -> None:
    for name in ("enable_expert_parallel", "enable_eplb"):
        if not isinstance(getattr(options, name), bool):
            raise BadConfig(f"{name} must be true or false, not {getattr(options, name)!r}")
    for name, least in (
        ("ep_size", 1),
        ("expert_engines", 1),
        ("ep_num_redundant_experts", 0),
        ("eplb_rebalance_num_iterations", 1),
        ("eplb_rebalance_layers_per_chunk", 1),
    ):
        value = getattr(options, name)
        wrong = isinstance(value, bool) or not isinstance(value, int) or value < least
        if wrong and not (name == "ep_size" and value is None):
            raise BadConfig(f"{name} must be an integer of at least {least}, not {value!r}")
    if options.moe_a2a_backend not in A2A_BACKENDS:
        raise BadConfig(
            f"moe_a2a_backend is {options.moe_a2a_backend!r}",
            f"Choose one of {', '.join(A2A_BACKENDS)}",
        )
    if options.moe_a2a_backend == "deepep":
        raise BadConfig("moe_a2a_backend is deepep, which is not built", "Use none")


def _placements(
    options: ExpertOptions, mixtures: list[MoeFfn], ranks: int
) -> list[tuple[int, ...]]:
    """The first placement of each mixture."""
    redundant = options.ep_num_redundant_experts
    first = [trivial_placement(ffn.experts, ranks, redundant) for ffn in mixtures]
    for ffn, placement in zip(mixtures, first, strict=True):
        if len(placement) > ffn.experts * ranks:
            raise BadConfig(
                f"ep_num_redundant_experts is {redundant}, which gives each of {ranks} ranks "
                f"{len(placement) // ranks} places for {ffn.experts} experts",
                f"Use at most {ffn.experts * (ranks - 1)}",
            )
    path = options.init_expert_location
    if path == TRIVIAL:
        return first
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))[PLACEMENT]
        read = [tuple(int(expert) for expert in layer) for layer in found]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise BadConfig(
            f"init_expert_location is {path!r}, which cannot be read: {error!r}",
            f'Use {TRIVIAL}, or a JSON file such as {{"{PLACEMENT}": [[0, 1, 2, 3], ...]}}',
        ) from None
    if len(read) != len(first):
        raise BadConfig(f"{path} places {len(read)} layers with experts of {len(first)}")
    for layer, (ffn, own, wanted) in enumerate(zip(mixtures, read, first, strict=True)):
        by_rank = [own[i : i + len(own) // ranks] for i in range(0, len(own), len(own) // ranks)]
        if (
            len(own) != len(wanted)
            or set(own) != set(range(ffn.experts))
            or any(len(set(some)) < len(some) for some in by_rank)
        ):
            raise BadConfig(
                f"{path}: layer {layer} must place experts 0 to {ffn.experts - 1} in "
                f"{len(wanted)} places, and none twice on one of {ranks} ranks"
            )
    return read


def trivial_placement(experts: int, ranks: int, redundant: int) -> tuple[int, ...]:
    """The expert in every place, rank by rank: all in order, then copies of the first ones:
    `redundant` of them, rounded up so that all ranks have the same number of places."""
    places = -(-(experts + redundant) // ranks) * ranks
    return tuple(place % experts for place in range(places))
