"""Training recipes as frozen dataclasses, without torch.

A recipe contains the model's config.json, which the engine reads too. A recipe file is JSON with
the same field names:

    {"config": {"model_type": "qwen_hils", ...}, "stages": [{"share": 1, "length": 4096, ...}], ...}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from cairn.errors import BadConfig
from cairn.names import suggestion

BYTES = "bytes"
"""Name of the tokenizer with one token per byte."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the run with sequences of one length.

    Attributes:
        share: fraction of the run's steps; they sum to 1.
        length: slots per sequence, a multiple of the page size.
        sequences: sequences per step.
        topk: numbers of pages per query; each step uses one of them.
        busy: fraction of sequences with many facts; others have one to three.
    """

    share: float
    length: int
    sequences: int
    topk: tuple[int, ...]
    busy: float

    @property
    def slots(self) -> int:
        """Slots per step."""
        return self.length * self.sequences


@dataclass(frozen=True, slots=True)
class Rates:
    """Learning rates and their schedule.

    Attributes:
        matrices: of Muon, for matrices of layers.
        embedding, gains: of Adam.
        warmup: steps of the linear warm-up.
        decay: final fraction of the run, over which they fall to `least`.
        least: factor of the rates at the end.
    """

    matrices: float = 0.02
    embedding: float = 2e-3
    gains: float = 4e-3
    warmup: int = 60
    decay: float = 0.4
    least: float = 0.02

    def factor(self, step: int, steps: int) -> float:
        """Learning-rate factor of a step (0-based)."""
        rising = min(1.0, (step + 1) / max(1, self.warmup))
        falling = (1 - step / steps) / self.decay if self.decay else 1.0
        return rising * min(1.0, max(self.least, falling))


@dataclass(frozen=True, slots=True)
class Recipe:
    """A training run.

    Attributes:
        config: the model, fields of config.json in the published names.
        steps: optimizer steps.
        stages: lengths, short to long.
        rates: learning rates.
        tokenizer: "bytes", or the size of a byte-pair vocabulary to train on the data.
        answer_weight: weight of the loss on answers relative to that on text.
        page_weight: of the loss on the softmax's share that selected pages have where plain text is
            predicted: it keeps pages that do not matter below softmax1's zero.
        seed: of everything that is drawn.
        log_steps: steps between two lines of the log.
        checkpoint_steps: between two states from which the run can go on, a multiple of log_steps.
    """

    config: Mapping[str, Any]
    steps: int
    stages: tuple[Stage, ...]
    rates: Rates = field(default_factory=Rates)
    tokenizer: str | int = BYTES
    answer_weight: float = 1.0
    page_weight: float = 0.0
    seed: int = 0
    log_steps: int = 50
    checkpoint_steps: int = 1000

    def __post_init__(self) -> None:
        if not self.stages or abs(sum(stage.share for stage in self.stages) - 1) > 1e-6:
            raise BadConfig("the shares of the stages do not add up to 1")
        for name in ("steps", "log_steps", "checkpoint_steps"):
            if getattr(self, name) < 1:
                raise BadConfig(f"{name} is {getattr(self, name)}", "Write at least 1")
        if self.checkpoint_steps % self.log_steps:
            raise BadConfig(
                f"checkpoint_steps is {self.checkpoint_steps}",
                f"Write a multiple of log_steps, {self.log_steps}",
            )
        for stage in self.stages:
            if stage.length < 2 or stage.sequences < 1 or not stage.topk or min(stage.topk) < 1:
                raise BadConfig(f"a stage is impossible: {stage}")
        if self.tokenizer != BYTES and not isinstance(self.tokenizer, int):
            raise BadConfig(f"tokenizer is {self.tokenizer!r}", f"Write {BYTES!r} or a size")

    def stage_of(self, step: int) -> Stage:
        """The stage of a step (0-based)."""
        end = 0.0
        for stage in self.stages:
            end += stage.share
            if step < round(end * self.steps):
                return stage
        return self.stages[-1]

    @property
    def slots(self) -> int:
        """Total number of slots of the run."""
        return sum(self.stage_of(step).slots for step in range(self.steps))

    def as_json(self) -> str:
        """The recipe as a recipe file."""
        return json.dumps(asdict(self), indent=2, sort_keys=True)


def embedded_config() -> dict[str, Any]:
    """The model that the shipped recipe trains: 7.6 million parameters, 14.4 MiB in bfloat16.

    Two layers have window attention only; the three above them select pages.
    """
    return {
        "architectures": ["HiLSForCausalLM"],
        "model_type": "qwen_hils",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": 512,
        "intermediate_size": 512,
        "num_hidden_layers": 5,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 1048576,
        "rope_theta": 10000.0,
        "apply_hils_rope": True,
        "enable_inrange_rope": True,
        "rope_context_length": 1024,
        "rope_period_multiplier": 2.0,
        "use_sliding_window": True,
        "sliding_window": 512,
        "mask_lmk_token": True,
        "num_swa_layers": 2,
        "full_attn_interleave": 1,
        "hils_sliding_window": 512,
        "chunk_size": 64,
        "hils_topk": 16,
        "insert_landmarks": True,
        "adjust_lmk_pos": True,
        "enable_lmk_q_proj": True,
        "lmk_q_lora_dim": 64,
        "enable_prior_query": True,
        "enable_softmax1": True,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def dense_config() -> dict[str, Any]:
    """Config of the dense counterpart: the same widths and depth, full causal attention, no
    landmarks."""
    kept = {
        name: value
        for name, value in embedded_config().items()
        if not name.startswith(("hils_", "enable_lmk", "enable_prior", "enable_softmax1", "lmk_q"))
    }
    return kept | {
        "use_sliding_window": False,
        "mask_lmk_token": False,
        "num_swa_layers": 0,
        "full_attn_interleave": 0,
        "insert_landmarks": False,
        "adjust_lmk_pos": False,
    }


def embedded() -> Recipe:
    """A model of 7.6 million parameters, small enough to ship in a package."""
    return Recipe(
        config=embedded_config(),
        steps=11000,
        stages=(
            # First select all pages, so that each page gets gradients.
            Stage(0.08, 1024, 32, (16,), 0.9),
            Stage(0.12, 2048, 16, (8, 16), 0.7),
            Stage(0.34, 4096, 8, (8, 16), 0.5),
            Stage(0.12, 16384, 2, (8,), 0.5),
            # Many pages early in training, so that the model learns to ignore some.
            Stage(0.08, 65536, 1, (8,), 0.5),
            Stage(0.12, 32768, 1, (8,), 0.5),
            Stage(0.09, 65536, 1, (8,), 0.5),
            Stage(0.05, 131072, 1, (8,), 0.5),
        ),
        page_weight=0.2,
    )


def dense() -> Recipe:
    """Dense counterpart of `embedded`: as many steps on the same text and tasks.

    Fewer steps have the greatest lengths, because dense attention is expensive there.
    """
    stages = (
        Stage(0.08, 1024, 32, (1,), 0.9),
        Stage(0.12, 2048, 16, (1,), 0.7),
        Stage(0.34, 4096, 8, (1,), 0.5),
        Stage(0.31, 16384, 2, (1,), 0.5),
        Stage(0.10, 32768, 1, (1,), 0.5),
        Stage(0.05, 65536, 1, (1,), 0.5),
    )
    return replace(embedded(), config=dense_config(), stages=stages, page_weight=0.0)


RECIPES = {"embedded": embedded, "dense": dense}
"""Shipped recipes by name."""


def smoke(recipe: Recipe) -> Recipe:
    """A small version of the run, with all stages and kinds of layers, for a few seconds on a
    CPU."""
    config = {
        **recipe.config,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    small = {"num_hidden_layers": 3, "num_swa_layers": 1, "lmk_q_lora_dim": 8, "chunk_size": 16}
    small |= {"sliding_window": 32, "hils_sliding_window": 32, "hils_topk": 2}
    config |= {name: min(value, config[name]) for name, value in small.items() if name in config}
    stages = tuple(
        replace(stage, length=128 * 2 ** min(i, 2), sequences=2, topk=(2,))
        for i, stage in enumerate(recipe.stages)
    )
    return replace(
        recipe,
        config=config,
        steps=4 * len(stages),
        stages=stages,
        tokenizer=BYTES if recipe.tokenizer == BYTES else 300,
        log_steps=2,
        checkpoint_steps=4,
    )


def load_recipe(name: str) -> Recipe:
    """A shipped recipe by name, or a recipe file.

    Raises:
        BadConfig: no such recipe, or a file that is none.
    """
    if name in RECIPES:
        return RECIPES[name]()
    path = Path(name)
    if not path.is_file():
        problem = f"there is no recipe {name!r}, and no such file"
        raise BadConfig(problem, suggestion(name, RECIPES))
    try:
        return from_json(path.read_text(encoding="utf-8"))
    except BadConfig as error:
        raise BadConfig(f"{path}: {error.message}", error.hint) from None


def from_json(text: str) -> Recipe:
    """A recipe from JSON in the form that `Recipe.as_json` writes.

    Raises:
        BadConfig: naming what is wrong.
    """
    try:
        given = json.loads(text)
    except ValueError as error:
        raise BadConfig(f"it is not JSON: {error}") from None
    values = _checked(Recipe, given)
    if not isinstance(values.get("stages"), list):
        raise BadConfig("stages is not a list", "Write a list of stages")
    values["stages"] = tuple(
        Stage(**{**_checked(Stage, stage), "topk": tuple(stage["topk"])})
        for stage in values["stages"]
    )
    if "rates" in values:
        values["rates"] = Rates(**_checked(Rates, values["rates"]))
    return Recipe(**values)


def _checked(kind: type[Any], given: Any) -> dict[str, Any]:
    """The fields of a dataclass, after checking that values have the types of its defaults."""
    what = kind.__name__.lower()
    if not isinstance(given, dict):
        raise BadConfig(f"a {what} is {given!r}", "Write an object")
    known = {f.name: str(f.type) for f in fields(kind)}
    for name, value in given.items():
        if name not in known:
            raise BadConfig(f"a {what} has no field {name!r}", suggestion(name, known))
        if not _fits(known[name], value):
            raise BadConfig(f"{name} is {value!r}", f"Write a value of the kind {known[name]}")
    required = [f.name for f in fields(kind) if f.default is f.default_factory]
    for name in required:
        if name not in given:
            raise BadConfig(f"a {what} needs {name!r}")
    return dict(given)


def _fits(kind: str, value: Any) -> bool:
    if isinstance(value, bool):
        return False
    if kind in ("int", "float"):
        return isinstance(value, int | float if kind == "float" else int)
    if kind == "tuple[int, ...]":
        return isinstance(value, list) and all(type(n) is int for n in value)
    return True
