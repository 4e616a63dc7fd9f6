"""Engine options, and `resolve`: every automatic choice is made here, once, with its reason."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Literal

from cairn.errors import BadConfig
from cairn.names import checked_keywords

GIB = 1 << 30
GPU_CHUNK = 132 * 128
"""Slots, in whole tiles: 16,384 tokens with their landmarks, none left for a step of its own."""
CPU_CHUNKS = {"float32": 17 * 64, "float16": 17 * 64, "bfloat16": 33 * 64}
"""So of 1,024 and 2,048 tokens: where products are fast, reading weights for every step counts."""
STRATEGIES = ("auto", "group", "head", "softmax_head")
BACKEND_NAMES = ("auto", "dense", "window", "hsa")
DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", "bf16", "fp8_e4m3")


def default_model_path() -> Path:
    """Folder of the model that ships with the package."""
    return Path(str(files("cairn") / "data" / "cairn-7m"))


@checked_keywords
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What the user asked for; None or "auto" leaves the choice to `resolve`.

    Attributes:
        dtype: "auto", "float32", "bfloat16" or "float16".
        device: "auto", "cpu", "cuda" or "cuda:N".
        kv_cache_dtype: of keys and values: "auto" (the dtype), "bf16" (must be it) or "fp8_e4m3".
        attention_backend: "auto", "dense", "window" or "hsa".
        max_model_len: longest sequence in user tokens, prompt and output together.
        kv_cache_memory: bytes of the page pool, or text such as "4GiB".
        gpu_memory_utilization: share of a GPU's memory of which pages get what is left.
        disable_cuda_graph: all steps on a GPU are launched operation by operation.
        disable_overlap_schedule: a step on a GPU is planned when the one before has ended.
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
    kv_cache_dtype: str = "auto"
    attention_backend: str = "auto"
    max_model_len: int | None = None
    kv_cache_memory: int | str | None = None
    gpu_memory_utilization: float | None = None
    disable_cuda_graph: bool = False
    disable_overlap_schedule: bool = False
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
        _one_of("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        _one_of("attention_backend", self.attention_backend, BACKEND_NAMES)
        _one_of("hsa_selection_strategy", self.hsa_selection_strategy, STRATEGIES)
        _one_of("load_format", self.load_format, ("auto", "random"))
        for name in ("max_model_len", "page_size", "hsa_topk", "hsa_window_size", "max_num_seqs"):
            _positive(name, getattr(self, name))
        _positive("chunked_prefill_size", self.chunked_prefill_size)
        for name in ("enable_prefix_caching", "disable_cuda_graph", "disable_overlap_schedule"):
            if not isinstance(getattr(self, name), bool):
                raise BadConfig(f"{name} must be true or false, not {getattr(self, name)!r}")
        _check_target(self.itl_target_ms, self.chunked_prefill_size)
        _check_share(self.gpu_memory_utilization, self.kv_cache_memory)
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
        native_bf16: the device that will be used multiplies bfloat16 matrices in hardware.
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
    One of `kv_cache_memory` and `gpu_memory_utilization` is None: the other one sizes the pages,
    whose number and the longest sequence are settled by the memory plan.
    """

    dtype: str
    kv_cache_dtype: str
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
    kv_cache_memory: int | None
    gpu_memory_utilization: float | None
    disable_cuda_graph: bool
    disable_overlap_schedule: bool
    choices: tuple[Choice, ...] = field(default=())
    warnings: tuple[str, ...] = field(default=())


def resolve(options: EngineOptions, model: ModelFacts, machine: Machine) -> EngineConfig:
    """Settle every option for this model and machine.

    Raises:
        BadConfig: an option that is impossible here; the message holds the right value.
    """
    choices: list[Choice] = []
    warnings: list[str] = []
    device = options.device
    if device == "auto":
        device = "cuda" if machine.has_cuda else "cpu"
        reason = "a CUDA device is here" if machine.has_cuda else "no CUDA device"
        choices.append(Choice("device", device, reason))
    elif device.startswith("cuda") and not machine.has_cuda:
        raise BadConfig(f"device is {device!r}, but no CUDA device is here", "Use cpu or auto")
    dtype = _resolve_dtype(options, model, machine, device, choices, warnings)
    page_size = _resolve_page_size(options, model, choices)
    backend = _resolve_backend(options, model, choices, warnings)
    layers, topk, window, strategy = _resolve_landmarks(options, model, warnings)
    chunk = _resolve_chunk(options, device, dtype, choices)
    memory, share = _resolve_memory(options, machine, device, choices)
    return EngineConfig(
        dtype=dtype,
        kv_cache_dtype=_resolve_kv_dtype(options, dtype),
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
        gpu_memory_utilization=share,
        disable_cuda_graph=options.disable_cuda_graph,
        disable_overlap_schedule=options.disable_overlap_schedule,
        choices=tuple(choices),
        warnings=tuple(warnings),
    )


def _resolve_dtype(
    options: EngineOptions,
    model: ModelFacts,
    machine: Machine,
    device: str,
    choices: list[Choice],
    warnings: list[str],
) -> str:
    no_bf16 = device.startswith("cuda") and not machine.native_bf16
    if options.dtype != "auto":
        if options.dtype == "bfloat16" and no_bf16:
            raise BadConfig("dtype is bfloat16, which this GPU does not have", "Use float32")
        if options.dtype == "float16" and model.dtype == "bfloat16":
            warnings.append("dtype=float16 for a bfloat16 checkpoint: beyond 65504 is infinity")
        return options.dtype
    if no_bf16 and model.dtype == "bfloat16":
        choices.append(Choice("dtype", "float32", "this GPU has no bfloat16"))
        return "float32"
    if device == "cpu" and model.dtype != "float32" and not machine.native_bf16:
        choices.append(Choice("dtype", "float32", f"this CPU has no matrix unit for {model.dtype}"))
        return "float32"
    if device == "cpu" and model.dtype == "float16":
        choices.append(Choice("dtype", "bfloat16", "CPUs multiply bfloat16, not float16"))
        return "bfloat16"
    choices.append(Choice("dtype", model.dtype, "the checkpoint says so"))
    return model.dtype


def _resolve_kv_dtype(options: EngineOptions, dtype: str) -> str:
    """The dtype's name, or "fp8_e4m3"."""
    if options.kv_cache_dtype == "bf16" and dtype != "bfloat16":
        raise BadConfig(f"kv_cache_dtype is bf16, but dtype is {dtype}", "Use auto or fp8_e4m3")
    return "fp8_e4m3" if options.kv_cache_dtype == "fp8_e4m3" else dtype


def _resolve_memory(
    options: EngineOptions, machine: Machine, device: str, choices: list[Choice]
) -> tuple[int | None, float | None]:
    """Bytes of the pages, or the share of a GPU's memory that all things together may take."""
    memory, share = _bytes(options.kv_cache_memory), options.gpu_memory_utilization
    if not device.startswith("cuda"):
        if share is not None:
            raise BadConfig(
                f"gpu_memory_utilization is {share}, but the device is {device}",
                "Use kv_cache_memory (--kv-cache-memory)",
            )
        if memory is None:
            memory = int(machine.free_memory * 0.4)
            told = f"{memory / GIB:.2f}GiB"
            choices.append(Choice("kv_cache_memory", told, "a share of the free memory"))
    elif memory is None and share is None:
        share = 0.9
        reason = "the default; the rest is room for what cannot be foreseen"
        choices.append(Choice("gpu_memory_utilization", share, reason))
    return memory, share


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


def _resolve_chunk(options: EngineOptions, device: str, dtype: str, choices: list[Choice]) -> int:
    if options.chunked_prefill_size is not None:
        return options.chunked_prefill_size
    chunk = GPU_CHUNK if device.startswith("cuda") else CPU_CHUNKS[dtype]
    # Without a target nothing is timed to decide anything: steps follow from the requests alone,
    # so that a run can be repeated step by step, and nobody's latency is guessed.
    reason = f"the default on {device} in {dtype}; "
    fixed = options.itl_target_ms is None
    reason += "no itl_target_ms asks for smaller chunks" if fixed else "cut to fit itl_target_ms"
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


def _check_share(share: object, memory: object) -> None:
    """Refuse a share that is none, or one beside a fixed size of the pages."""
    if share is None:
        return
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise BadConfig(f"gpu_memory_utilization must be a share in (0, 1], not {share!r}")
    if memory is not None:
        what = f"gpu_memory_utilization is {share}, but kv_cache_memory fixes the pages ({memory})"
        raise BadConfig(what, "Give one of the two")


def _positive(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadConfig(f"{name} must be a positive integer, not {value!r}")
