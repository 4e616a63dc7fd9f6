"""Engine options, and `resolve`: every automatic choice is made here, once, with its reason."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Literal

from cairn.errors import BadConfig, OutOfMemory
from cairn.names import checked_keywords

GIB = 1 << 30
STRATEGIES = ("auto", "group", "head", "softmax_head")
BACKEND_NAMES = ("auto", "dense", "window", "hsa")
DTYPES = ("auto", "float32", "bfloat16", "float16")


def default_model_path() -> Path:
    """Folder of the model that ships with the package."""
    return Path(str(files("cairn") / "data" / "tiny-hils"))


@checked_keywords
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What the user asked for; None or "auto" leaves the choice to `resolve`.

    Attributes:
        dtype: "auto", "float32", "bfloat16" or "float16".
        device: "auto", "cpu", "cuda" or "cuda:N".
        attention_backend: "auto", "dense", "window" or "hsa".
        max_model_len: longest sequence in user tokens, prompt and output together.
        kv_cache_memory: bytes of the page pool, or text such as "4GiB".
        page_size: slots per page; must be the chunk size of a landmark model.
        seed: base of the draws of requests that bring no seed.
        max_num_seqs: requests that run at once.
        chunked_prefill_size: slots that one step may run.
        itl_target_ms: milliseconds between the tokens of a running stream, to be kept while others
            prefill: chunks are sized by measured step times. None: chunks keep their size.
        enable_prefix_caching: pages of finished work serve later requests.
        hsa_topk: pages selected per query.
        hsa_selection_strategy: "auto" (the model's own rule), "group", "head" or "softmax_head".
        hsa_layers: landmark layers, as text ("0-3,7") or a sequence of numbers.
        hsa_window_size: slots of the landmark layers' window.
        hsa_lmk_id: landmark token id; -1: the vocabulary size.
        load_format: "auto" reads the folder's weights; "random" draws them (benchmarks).
    """

    dtype: str = "auto"
    device: str = "auto"
    attention_backend: str = "auto"
    max_model_len: int | None = None
    kv_cache_memory: int | str | None = None
    page_size: int | None = None
    seed: int = 0
    max_num_seqs: int = 64
    chunked_prefill_size: int | None = None
    itl_target_ms: float | None = None
    enable_prefix_caching: bool = True
    hsa_topk: int | None = None
    hsa_selection_strategy: str = "auto"
    hsa_layers: str | Sequence[int] | None = None
    hsa_window_size: int | None = None
    hsa_lmk_id: int = -1
    load_format: Literal["auto", "random"] = "auto"

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("attention_backend", self.attention_backend, BACKEND_NAMES)
        _one_of("hsa_selection_strategy", self.hsa_selection_strategy, STRATEGIES)
        _one_of("load_format", self.load_format, ("auto", "random"))
        for name in ("max_model_len", "page_size", "hsa_topk", "hsa_window_size"):
            _positive(name, getattr(self, name))
        _positive("max_num_seqs", self.max_num_seqs)
        _positive("chunked_prefill_size", self.chunked_prefill_size)
        _check_target(self.itl_target_ms, self.chunked_prefill_size)
        if type(self.seed) is not int:
            raise BadConfig(f"seed must be an integer, not {self.seed!r}")
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", str(self.device)):
            raise BadConfig(
                f"device is {self.device!r}", "Use auto, cpu, cuda or cuda:N with a device number"
            )


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What `resolve` must know of a model.

    Attributes:
        page_size: the trained chunk size, None for a model that takes any.
        landmarks: landmark slots exist.
        landmark_id: token id of the landmark (the vocabulary size).
        max_model_len: trained context in user tokens.
        dtype: dtype named by the checkpoint.
        landmark_layers: numbers of the layers with landmark selection.
        num_layers: all layers.
        topk, window: of the landmark layers, None without any.
    """

    page_size: int | None
    landmarks: bool
    landmark_id: int
    max_model_len: int
    dtype: str
    landmark_layers: tuple[int, ...]
    num_layers: int
    topk: int | None
    window: int | None


@dataclass(frozen=True, slots=True)
class Machine:
    """What `resolve` must know of the machine.

    Attributes:
        has_cuda: a CUDA device can be used.
        native_bf16: the CPU multiplies bfloat16 matrices in hardware.
        free_memory: bytes free on the device that will be used.
    """

    has_cuda: bool
    native_bf16: bool
    free_memory: int


@dataclass(frozen=True, slots=True)
class Choice:
    """One resolved value and why it was taken."""

    name: str
    value: object
    reason: str

    def __str__(self) -> str:
        return f"{self.name}={self.value}  because {self.reason}"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything decided: no None that means "choose later", no "auto".

    `landmark_layers`, `topk` and `window` describe the layers computed by `attention_backend`.
    `itl_target_ms` is None where no target was given: chunks then keep their size.
    `num_pages` and `max_model_len` are settled by `plan_memory`.
    """

    dtype: str
    device: str
    attention_backend: str
    page_size: int
    seed: int
    max_num_seqs: int
    chunked_prefill_size: int
    itl_target_ms: float | None
    enable_prefix_caching: bool
    landmark_layers: tuple[int, ...]
    topk: int | None
    window: int | None
    strategy: str
    load_format: str
    kv_cache_memory: int
    choices: tuple[Choice, ...] = field(default=())
    warnings: tuple[str, ...] = field(default=())


def resolve(options: EngineOptions, model: ModelFacts, machine: Machine) -> EngineConfig:
    """Settle every option for this model and machine.

    Raises:
        BadConfig: an option that is impossible here; the message holds the right value.
    """
    choices: list[Choice] = []
    warnings: list[str] = []

    def chose(name: str, value: object, reason: str) -> None:
        choices.append(Choice(name, value, reason))

    device = options.device
    if device == "auto":
        device = "cuda" if machine.has_cuda else "cpu"
        chose("device", device, "a CUDA device is here" if machine.has_cuda else "no CUDA device")
    elif device.startswith("cuda") and not machine.has_cuda:
        raise BadConfig(f"device is {device!r}, but no CUDA device is here", "Use cpu or auto")
    dtype = _resolve_dtype(options, model, machine, device, choices)
    page_size = _resolve_page_size(options, model, choices)
    backend = _resolve_backend(options, model, choices, warnings)
    layers, topk, window, strategy = _resolve_landmarks(options, model, warnings)
    chunk = _resolve_chunk(options, device, choices)
    memory = _bytes(options.kv_cache_memory)
    if memory is None:
        memory = int(machine.free_memory * (0.8 if device.startswith("cuda") else 0.4))
        chose("kv_cache_memory", f"{memory / GIB:.2f}GiB", "a share of the free memory")
    return EngineConfig(
        dtype=dtype,
        device=device,
        attention_backend=backend,
        page_size=page_size,
        seed=options.seed,
        max_num_seqs=options.max_num_seqs,
        chunked_prefill_size=chunk,
        itl_target_ms=options.itl_target_ms,
        enable_prefix_caching=options.enable_prefix_caching,
        landmark_layers=layers,
        topk=topk,
        window=window,
        strategy=strategy,
        load_format=options.load_format,
        kv_cache_memory=memory,
        choices=tuple(choices),
        warnings=tuple(warnings),
    )


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How many pages there are and how long a sequence may be.

    Attributes:
        num_pages: pages of the pool.
        bytes_per_page: keys, values and summaries of all layers.
        max_model_len: longest sequence in user tokens, prompt and output together.
        choices: the automatic values with their reasons.
    """

    num_pages: int
    bytes_per_page: int
    max_model_len: int
    choices: tuple[Choice, ...]


def plan_memory(
    options: EngineOptions,
    config: EngineConfig,
    model: ModelFacts,
    bytes_per_page: int,
) -> MemoryPlan:
    """Pages that the pool's memory holds, never more than all rows at full length can use.

    Raises:
        BadConfig: `max_model_len` is longer than the model was made for.
        OutOfMemory: the pool does not hold one sequence of the asked length.
    """
    choices: list[Choice] = []
    asked = options.max_model_len
    if asked is not None and asked > model.max_model_len:
        raise BadConfig(
            f"max_model_len is {asked}, but the model was made for {model.max_model_len} tokens",
            f"Use at most {model.max_model_len}",
        )
    longest = asked or model.max_model_len
    tokens_per_page = config.page_size - 1 if model.landmarks else config.page_size
    useful = config.max_num_seqs * -(-longest // tokens_per_page)
    num_pages = min(config.kv_cache_memory // bytes_per_page, useful)
    capacity = num_pages * tokens_per_page
    if asked is not None and capacity < asked:
        need = -(-asked // tokens_per_page) * bytes_per_page
        raise OutOfMemory(
            f"one sequence of max_model_len {asked} needs {need} bytes of pages, "
            f"but kv_cache_memory is {config.kv_cache_memory}",
            f"Set kv_cache_memory (--kv-cache-memory) to at least {need}, or lower max_model_len",
        )
    if num_pages < 1:
        raise OutOfMemory(
            f"one page needs {bytes_per_page} bytes, but kv_cache_memory is "
            f"{config.kv_cache_memory}",
            "Raise kv_cache_memory (--kv-cache-memory)",
        )
    if asked is None and capacity < longest:
        longest = capacity
        choices.append(
            Choice("max_model_len", longest, "that is what kv_cache_memory holds in one sequence")
        )
    elif asked is None:
        choices.append(Choice("max_model_len", longest, "the model was made for it"))
    return MemoryPlan(num_pages, bytes_per_page, longest, tuple(choices))


def _resolve_dtype(
    options: EngineOptions,
    model: ModelFacts,
    machine: Machine,
    device: str,
    choices: list[Choice],
) -> str:
    if options.dtype != "auto":
        return options.dtype
    if device == "cpu" and model.dtype != "float32" and not machine.native_bf16:
        choices.append(Choice("dtype", "float32", f"this CPU has no matrix unit for {model.dtype}"))
        return "float32"
    if device == "cpu" and model.dtype == "float16":
        choices.append(Choice("dtype", "bfloat16", "CPUs multiply bfloat16, not float16"))
        return "bfloat16"
    choices.append(Choice("dtype", model.dtype, "the checkpoint says so"))
    return model.dtype


def _resolve_page_size(options: EngineOptions, model: ModelFacts, choices: list[Choice]) -> int:
    if model.page_size is None:
        if options.page_size is None:
            choices.append(Choice("page_size", 64, "the default for a model without landmarks"))
        return options.page_size or 64
    if options.page_size not in (None, model.page_size):
        raise BadConfig(
            f"page_size is {options.page_size}, but a page must be a chunk of the model "
            f"(chunk_size {model.page_size})",
            f"Use --page-size {model.page_size} or leave it out",
        )
    choices.append(Choice("page_size", model.page_size, "it is the model's chunk size"))
    return model.page_size


def _resolve_chunk(options: EngineOptions, device: str, choices: list[Choice]) -> int:
    if options.chunked_prefill_size is not None:
        return options.chunked_prefill_size
    chunk = 8192 if device.startswith("cuda") else 1024
    # Without a target nothing is timed to decide anything: steps follow from the requests alone,
    # so that a run can be repeated step by step, and nobody's latency is guessed.
    reason = (
        f"the default on {device}; no itl_target_ms asks for smaller chunks"
        if options.itl_target_ms is None
        else f"the default on {device}; cut to fit itl_target_ms while rows decode"
    )
    choices.append(Choice("chunked_prefill_size", chunk, reason))
    return chunk


def _resolve_backend(
    options: EngineOptions, model: ModelFacts, choices: list[Choice], warnings: list[str]
) -> str:
    trained = "hsa" if model.landmark_layers else "dense"
    backend = options.attention_backend
    if backend == "auto":
        reason = (
            f"{len(model.landmark_layers)} of {model.num_layers} layers select pages by landmarks"
            if model.landmark_layers
            else "no layer of the model has landmarks"
        )
        choices.append(Choice("attention_backend", trained, reason))
        return trained
    if not model.landmark_layers and backend != "dense":
        raise BadConfig(
            f"attention_backend is {backend!r}, but no layer of this model was trained for it",
            "Use --attention-backend dense or auto",
        )
    if backend != trained:
        warnings.append(
            f"attention_backend={backend} contradicts the trained model ({trained}): "
            "its landmark layers compute something else than they learned"
        )
    return backend


def _resolve_landmarks(
    options: EngineOptions, model: ModelFacts, warnings: list[str]
) -> tuple[tuple[int, ...], int | None, int | None, str]:
    """Landmark layers, top-k, window and strategy, each checked against the trained model."""
    given = {
        "hsa_topk": options.hsa_topk,
        "hsa_window_size": options.hsa_window_size,
        "hsa_layers": options.hsa_layers,
        "hsa_selection_strategy": (
            None if options.hsa_selection_strategy == "auto" else options.hsa_selection_strategy
        ),
    }
    if not model.landmark_layers:
        for name, value in given.items():
            if value is not None:
                raise BadConfig(
                    f"{name} is {value!r}, but this model has no landmark layers",
                    "Leave the option out",
                )
        return (), None, None, "hils"
    if options.hsa_lmk_id not in (-1, model.landmark_id):
        raise BadConfig(
            f"hsa_lmk_id is {options.hsa_lmk_id}, but the model's landmark id is "
            f"{model.landmark_id} (its vocabulary size)",
            f"Use --hsa-lmk-id {model.landmark_id} or -1",
        )
    layers = model.landmark_layers
    if options.hsa_layers is not None:
        layers = parse_layers(options.hsa_layers, model.num_layers)
        extra = sorted(set(layers) - set(model.landmark_layers))
        if extra:
            raise BadConfig(
                f"hsa_layers names {extra}, which have no landmark weights",
                f"Choose among {format_layers(model.landmark_layers)}",
            )
        if layers != model.landmark_layers:
            warnings.append(
                f"hsa_layers={format_layers(layers)} contradicts the trained model "
                f"({format_layers(model.landmark_layers)}): the other layers read their window only"
            )
    topk, window = options.hsa_topk or model.topk, options.hsa_window_size or model.window
    if topk != model.topk:
        warnings.append(f"hsa_topk={topk} contradicts the trained model ({model.topk})")
    if window != model.window:
        warnings.append(f"hsa_window_size={window} contradicts the trained model ({model.window})")
    strategy = given["hsa_selection_strategy"]
    if strategy is not None:
        warnings.append(
            f"hsa_selection_strategy={strategy} contradicts the trained model, whose rule is auto"
        )
    return layers, topk, window, str(strategy or "hils")


def parse_layers(layers: str | Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Layer numbers from "0-3,7" or a sequence, ascending and without repeats.

    Raises:
        BadConfig: not of that form, or a number outside 0 .. num_layers - 1.
    """
    found: set[int] = set()
    if isinstance(layers, str):
        for part in layers.split(","):
            match = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)
            if match is None:
                raise BadConfig(f"hsa_layers has {part!r}", "Write numbers and ranges: 0-3,7")
            first, last = int(match[1]), int(match[2] or match[1])
            if last < first:
                raise BadConfig(f"hsa_layers has the empty range {part!r}", "Write first-last")
            # One number too many is enough to be refused below, however far the range goes.
            found.update((first, *range(first, min(last, num_layers) + 1)))
    else:
        numbers = tuple(layers) if isinstance(layers, Iterable) else (layers,)
        if not all(type(n) is int for n in numbers):
            raise BadConfig(f"hsa_layers is {layers!r}", "Write numbers and ranges: 0-3,7")
        found.update(numbers)
    outside = sorted(n for n in found if not 0 <= n < num_layers)
    if outside:
        raise BadConfig(
            f"hsa_layers names layer {outside[0]}, but the model has {num_layers}",
            f"Layers are 0 to {num_layers - 1}",
        )
    return tuple(sorted(found))


def format_layers(layers: Sequence[int]) -> str:
    """Layer numbers as ranges: (0, 1, 2, 7) -> "0-2,7"."""
    parts: list[str] = []
    start = 0
    for i in range(len(layers)):
        if i + 1 < len(layers) and layers[i + 1] == layers[i] + 1:
            continue
        first, last = layers[start], layers[i]
        parts.append(str(first) if first == last else f"{first}-{last}")
        start = i + 1
    return ",".join(parts)


def _bytes(value: int | str | None) -> int | None:
    if value is None:
        return None
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9.]+)\s*([KMGT]i?B?|B)?\s*", value, re.IGNORECASE)
        try:
            number = float(match[1]) if match else -1.0
        except ValueError:
            number = -1.0
        if match is None or number <= 0:
            raise BadConfig(f"kv_cache_memory is {value!r}", "Write bytes or a size such as 4GiB")
        unit = (match[2] or "B").upper()
        base = 1024 if "I" in unit or len(unit) == 1 else 1000
        value = int(number * base ** " KMGT".index(unit[0])) if unit != "B" else int(number)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise BadConfig(f"kv_cache_memory is {value!r}", "Write bytes or a size such as 4GiB")
    return value


def _one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise BadConfig(f"{name} is {value!r}", f"Choose one of {', '.join(known)}")


def _check_target(target: object, chunk: int | None) -> None:
    """Refuse a target that is no duration, or one beside a fixed chunk."""
    if target is None:
        return
    duration = isinstance(target, int | float) and 0 < target < math.inf
    if isinstance(target, bool) or not duration:
        raise BadConfig(f"itl_target_ms must be a positive number of milliseconds, not {target!r}")
    if chunk is not None:
        raise BadConfig(
            f"itl_target_ms is {target} and chunked_prefill_size is {chunk}, but the one sizes "
            "chunks by time and the other fixes them",
            "Give one of the two",
        )


def _positive(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadConfig(f"{name} must be a positive integer, not {value!r}")
