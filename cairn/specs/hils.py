"""Landmark attention (HiLS): a local window, and a few pages that each query selects.

Also the options of these layers, such as `--hsa-topk`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, Self

from cairn.errors import BadConfig
from cairn.specs.backends import DENSE, HSA, WINDOW
from cairn.specs.choice import Notes
from cairn.specs.gqa import GqaSpec, NormWidth, describe_reads
from cairn.specs.layer_list import format_layers, parse_layers
from cairn.specs.model import ModelSpec

SummaryKind = Literal["prior", "mean", "landmark"]
STRATEGIES = ("auto", "group", "head", "softmax_head")


@dataclass(frozen=True, slots=True, kw_only=True)
class HilsSpec(GqaSpec):
    """Landmark attention; `window` is aligned down to a page start and never None.

    Attributes:
        topk: pages selected per query and KV head.
        softmax1: a zero logit joins the page softmax.
        summary: key of a page: "prior" (pooled by the prior query, one per query head), "mean" of
            its keys or the "landmark"'s own key (one per KV head).
        bias_by_entropy: a page has the entropy of its prior pooling as a bias, one per query head.
        shared_query: the prior query is a learned constant, not the landmark's query.
        group_query: the pooled key is one per KV head, by the group's mean prior query.
        lmk_q: projection of the landmark query: "full", "lora" (with the raw query added), or
            None: the attention query itself.
        lora_rank: rank of "lora", else 0.
        lmk_q_norm: width of its norm.
        shared_lmk_q_norm: that norm is the query's, without a tensor of its own.
        strategy: how pages are selected: "hils" (the model's own rule), "group", "head" or
            "softmax_head".
    """

    topk: int
    softmax1: bool
    summary: SummaryKind
    bias_by_entropy: bool
    shared_query: bool = False
    group_query: bool = False
    lmk_q: Literal["full", "lora"] | None = None
    lora_rank: int = 0
    lmk_q_norm: NormWidth = "head"
    shared_lmk_q_norm: bool = False
    strategy: str = "hils"

    ALTERNATIVES: ClassVar[tuple[str, ...]] = (HSA, WINDOW, DENSE)
    """Backends that can compute it; models are trained with the first."""

    def __post_init__(self) -> None:
        if self.window is None:
            raise ValueError("a landmark layer has a window")
        if not self.backend:
            object.__setattr__(self, "backend", HSA)

    def of_rank(self, ranks: int) -> Self:
        """See the base. The query heads of a KV head select its pages together: ranks that hold the
        same KV head compute all of them, and project a part each."""
        # A class with slots is made twice, so super() does not know it.
        own = GqaSpec.of_rank(self, ranks)
        if not self.selects or ranks <= self.num_kv_heads:
            return own
        together = self.num_heads // self.num_kv_heads
        return replace(own, num_heads=together, out_heads=own.num_heads)

    @property
    def selects(self) -> bool:
        """Not when it is computed as plain window or dense attention."""
        return self.backend == HSA

    @property
    def aligned(self) -> bool:
        """The window begins at the start of a page."""
        return True

    @property
    def local_window(self) -> int:
        """Slots of the window."""
        assert self.window is not None
        return self.window

    @property
    def needs_summary_query(self) -> bool:
        """Pages are pooled by a prior query."""
        return self.bias_by_entropy or self.summary == "prior"

    @property
    def summary_heads(self) -> int:
        """Heads of a page's summary key."""
        per_query_head = self.summary == "prior" and not self.group_query
        return self.num_heads if per_query_head else self.num_kv_heads

    @property
    def description(self) -> str:
        """Description for `cairn inspect`."""
        if not self.selects:
            return describe_reads(self)
        return (
            f"landmark selection: top {self.topk} pages and a window of {self.window} slots, "
            f"{self.summary} summaries"
        )


def _option(default: object, flag_help: str, **more: Any) -> Any:
    return field(default=default, metadata={"help": flag_help, **more})


@dataclass(frozen=True, kw_only=True)
class HilsOptions:
    """Options of landmark layers.

    Attributes:
        hsa_topk: pages selected per query.
        hsa_selection_strategy: "auto" (the model's own rule), "group", "head" or "softmax_head".
        hsa_layers: landmark layers, as text ("0-3,7") or a sequence of numbers.
        hsa_window_size: slots of the landmark layers' window.
        hsa_lmk_id: landmark token id; -1: the vocabulary size.
    """

    hsa_topk: int | None = _option(
        None, ("Pages that a query of a landmark layer selects.  [default: the model's]"), type=int
    )
    hsa_selection_strategy: str = _option(
        "auto",
        ("Rule by which pages are selected; auto: the model's own.  [default: auto]"),
        choices=STRATEGIES,
    )
    hsa_layers: str | Sequence[int] | None = _option(
        None,
        "Landmark layers that select pages, such as 0-3,7; the others read their window only.  "
        "[default: the model's]",
        metavar="LIST",
    )
    hsa_window_size: int | None = _option(
        None, ("Slots of the window of landmark layers.  [default: the model's]"), type=int
    )
    hsa_lmk_id: int = _option(
        -1, "Token id of landmarks; -1: the vocabulary size.  [default: -1]", type=int
    )


def resolve_hils(model: ModelSpec, options: HilsOptions, backend: str, notes: Notes) -> ModelSpec:
    """The model with the user's options applied to its landmark layers.

    Args:
        model: as trained.
        options: what the user asked for.
        backend: backend of the landmark layers.
        notes: gets a warning for every option that contradicts the trained model.

    Raises:
        BadConfig: an option that is impossible for this model.
    """
    own = {i: mixer for i, mixer in enumerate(model.mixers) if isinstance(mixer, HilsSpec)}
    if not own:
        _refuse_all(options)
        return model
    trained = tuple(own)
    if options.hsa_lmk_id not in (-1, model.landmark_id):
        raise BadConfig(
            f"hsa_lmk_id is {options.hsa_lmk_id}, but the model's landmark id is "
            f"{model.landmark_id} (its vocabulary size)",
            f"Use --hsa-lmk-id {model.landmark_id} or -1",
        )
    chosen = _chosen_layers(options, trained, model.num_layers, notes)
    layers = list(model.layers)
    for i, mixer in own.items():
        changed = _changed(mixer, options, backend if i in chosen else WINDOW)
        layers[i] = replace(layers[i], mixer=changed)
    _warn(own[trained[0]], options, notes)
    return replace(model, layers=tuple(layers))


def _refuse_all(options: HilsOptions) -> None:
    """A model without landmark layers has nothing to change."""
    for entry in fields(HilsOptions):
        value = getattr(options, entry.name)
        if entry.name != "hsa_lmk_id" and value != entry.default:
            raise BadConfig(
                f"{entry.name} is {value!r}, but this model has no landmark layers",
                "Leave the option out",
            )


def _chosen_layers(
    options: HilsOptions, trained: tuple[int, ...], num_layers: int, notes: Notes
) -> tuple[int, ...]:
    """The layers that select pages; the other landmark layers read their window only."""
    if options.hsa_layers is None:
        return trained
    layers = parse_layers(options.hsa_layers, num_layers)
    extra = sorted(set(layers) - set(trained))
    if extra:
        raise BadConfig(
            f"hsa_layers names {extra}, which have no landmark weights",
            f"Choose among {format_layers(trained)}",
        )
    if layers != trained:
        notes.warn(
            f"hsa_layers={format_layers(layers)} contradicts the trained model "
            f"({format_layers(trained)}): the other layers read their window only"
        )
    return layers


def _changed(mixer: HilsSpec, options: HilsOptions, backend: str) -> HilsSpec:
    """A landmark layer with the user's options."""
    mixer = replace(
        mixer,
        backend=backend,
        topk=options.hsa_topk or mixer.topk,
        window=options.hsa_window_size or mixer.window,
    )
    if options.hsa_selection_strategy == "auto":
        return mixer
    # The older strategies score a page by its landmark's key instead of the model's pooled summary.
    return replace(
        mixer,
        strategy=options.hsa_selection_strategy,
        summary="landmark",
        bias_by_entropy=False,
        group_query=False,
    )


def _warn(mixer: HilsSpec, options: HilsOptions, notes: Notes) -> None:
    """Warn of options that contradict a trained layer."""
    for name, value, trained in (
        ("hsa_topk", options.hsa_topk, mixer.topk),
        ("hsa_window_size", options.hsa_window_size, mixer.window),
    ):
        if value is not None and value != trained:
            notes.warn(f"{name}={value} contradicts the trained model ({trained})")
    if options.hsa_selection_strategy != "auto":
        notes.warn(
            f"hsa_selection_strategy={options.hsa_selection_strategy} contradicts the trained "
            "model, whose rule is auto"
        )
