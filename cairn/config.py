"""Engine options, and `resolve`, which makes every automatic choice and records its reason."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Literal

from cairn.errors import BadConfig
from cairn.names import checked_keywords
from cairn.specs.backends import HSA
from cairn.specs.choice import Choice, Notes
from cairn.specs.disaggregation import (
    Disaggregation,
    DisaggregationOptions,
    resolve_disaggregation,
)
from cairn.specs.experts import Balance, ExpertOptions, resolve_experts
from cairn.specs.kv_format import KV_FORMATS
from cairn.specs.media import MediaLimits, MediaOptions, media_model, resolve_media
from cairn.specs.model import ModelSpec
from cairn.specs.nodes import NodeOptions, Nodes, resolve_nodes
from cairn.specs.options import MixerOptions, resolve_mixers
from cairn.specs.quantization import QuantizationSpec
from cairn.specs.speculation import NEXTN, Speculation, SpeculativeOptions, resolve_speculation

GIB = 1 << 30
HOST_SHARE = 0.4
"""Default share of the free host memory for the page pool on a CPU."""
GPU_CHUNK = 132 * 128
"""Default slots per step on a GPU: 16,384 tokens with their landmarks, a multiple of 128."""
CPU_CHUNKS = {"float32": 17 * 64, "float16": 17 * 64, "bfloat16": 33 * 64}
"""Default slots per step on a CPU, by dtype: 1,024 tokens, or 2,048 in bfloat16."""
DTYPES = ("auto", "float32", "bfloat16", "float16")
SMALL_KV_DTYPES = (*KV_FORMATS, "fp8_ds")
KV_CACHE_DTYPES = ("auto", "bf16", *SMALL_KV_DTYPES)


def default_model_path() -> Path:
    """Folder of the model that ships with the package."""
    return Path(str(files("cairn") / "data" / "cairn-7m"))


@checked_keywords
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions(
    NodeOptions,
    ExpertOptions,
    DisaggregationOptions,
    SpeculativeOptions,
    MixerOptions,
    MediaOptions,
):
    """Options of an engine. None or "auto" leaves the choice to `resolve`.

    Options of mixers, speculative decoding, images, disaggregation, experts and nodes are inherited
    from the classes that declare and resolve them.

    Attributes:
        dtype: "auto", "float32", "bfloat16" or "float16".
        device: "auto", "cpu", "cuda" or "cuda:N", which becomes the process's current device.
        kv_cache_dtype: dtype of the cache: "auto" (`dtype`), "bf16" (requires that `dtype`),
            "fp8_e4m3" or "fp4_e2m1" for keys and values, "fp8_ds" for latent attention.
        max_model_len: maximum length of prompt and output together, in user tokens.
        allow_long_max_model_len: max_model_len may exceed the length the model was trained for.
        kv_cache_memory: bytes of the page pool of each rank, or text such as "4GiB".
        kv_host_memory: bytes of host memory, or text such as "64GiB", for pages that the prefix
            cache on the device evicts; None discards them.
        kv_host_tier: keep all pages of landmark layers in kv_host_memory. The device keeps their
            summaries, the window pages, and frames, which cache selected pages.
        gpu_memory_utilization: share of a GPU's memory for weights, activations and pages.
        disable_cuda_graph: launch the operations of all steps on a GPU one by one.
        disable_overlap_schedule: plan a step on a GPU after the previous one has ended.
        page_size: slots per page; must be the chunk size of a landmark model.
        seed: base seed of the sampling of requests without a seed.
        max_num_seqs: maximum number of running requests.
        chunked_prefill_size: maximum number of slots per step.
        itl_target_ms: target of the milliseconds between two tokens of a running stream while other
            requests prefill; chunks are sized by measured step times. None keeps chunks fixed.
        enable_prefix_caching: reuse the pages of finished requests for later ones.
        load_format: "auto" reads the folder's weights, "random" generates weights (benchmarks).
        quantization: "auto" keeps the checkpoint's format, except that experts in fp4 are
            dequantised on load; "fp8" converts the matrices of an unquantised checkpoint to e4m3
            with row-wise scales on load; "fp4" dequantises experts in fp4 when they run.
        tensor_parallel_size: number of ranks that share the model: GPUs, or processes on a CPU.
    """

    dtype: str = "auto"
    device: str = "auto"
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None
    allow_long_max_model_len: bool = False
    kv_cache_memory: int | str | None = None
    kv_host_memory: int | str | None = None
    kv_host_tier: bool = False
    gpu_memory_utilization: float | None = None
    disable_cuda_graph: bool = False
    disable_overlap_schedule: bool = False
    page_size: int | None = None
    seed: int = 0
    max_num_seqs: int = 64
    chunked_prefill_size: int | None = None
    itl_target_ms: float | None = None
    enable_prefix_caching: bool = True
    load_format: Literal["auto", "random"] = "auto"
    quantization: Literal["auto", "fp8", "fp4"] = "auto"
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        _one_of("load_format", self.load_format, ("auto", "random"))
        _one_of("quantization", self.quantization, ("auto", "fp8", "fp4"))
        for name in ("max_model_len", "page_size", "max_num_seqs", "tensor_parallel_size"):
            _positive(name, getattr(self, name))
        _positive("chunked_prefill_size", self.chunked_prefill_size)
        self.check()
        for name in (
            "enable_prefix_caching",
            "disable_cuda_graph",
            "disable_overlap_schedule",
            "kv_host_tier",
            "allow_long_max_model_len",
        ):
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
class Machine:
    """Properties of the machine that `resolve` needs.

    Attributes:
        has_cuda: there is a usable CUDA device.
        native_bf16: the engine's device multiplies bfloat16 matrices in hardware.
        free_memory: free bytes on the engine's device.
    """

    has_cuda: bool
    native_bf16: bool
    free_memory: int


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The resolved engine configuration, without "auto".

    `model` has the options of its mixers applied.
    `itl_target_ms` is None without a target: chunks then have a fixed size.
    `speculation` is None without speculative decoding, `balance` without expert balancing, `nodes`
    if all ranks are on this host.
    Exactly one of `kv_cache_memory` and `gpu_memory_utilization` is None; the other one sizes the
    page pool. The memory plan computes the number of pages and the longest sequence.
    """

    model: ModelSpec
    dtype: str
    kv_cache_dtype: str
    device: str
    page_size: int
    seed: int
    max_num_seqs: int
    chunked_prefill_size: int
    itl_target_ms: float | None
    enable_prefix_caching: bool
    load_format: str
    kv_cache_memory: int | None
    gpu_memory_utilization: float | None
    disable_cuda_graph: bool
    disable_overlap_schedule: bool
    kv_host_memory: int = 0
    kv_host_tier: bool = False
    tensor_parallel_size: int = 1
    balance: Balance | None = None
    nodes: Nodes | None = None
    disaggregation: Disaggregation | None = None
    speculation: Speculation | None = None
    media: MediaLimits = field(default_factory=MediaLimits)
    choices: tuple[Choice, ...] = field(default=())
    warnings: tuple[str, ...] = field(default=())

    @property
    def staging(self) -> int:
        """Bytes of GPU memory for page transfers; 0 if they use host memory or are disabled."""
        return 0 if self.disaggregation is None else self.disaggregation.staging

    @property
    def ranks_here(self) -> int:
        """Number of ranks on this host."""
        return self.tensor_parallel_size // (1 if self.nodes is None else self.nodes.count)


def resolve(options: EngineOptions, model: ModelSpec, machine: Machine) -> EngineConfig:
    """Resolve all options for a model and a machine.

    Raises:
        BadConfig: an option that is invalid here; the message contains a valid value.
    """
    notes = Notes()
    device = options.device
    if device == "auto":
        device = "cuda" if machine.has_cuda else "cpu"
        reason = "a CUDA device is here" if machine.has_cuda else "no CUDA device"
        notes.chose("device", device, reason)
    elif device.startswith("cuda") and not machine.has_cuda:
        raise BadConfig(f"device is {device!r}, but no CUDA device is here", "Use cpu or auto")
    dtype = _resolve_dtype(options, model, machine, device, notes)
    page_size = _resolve_page_size(options, model, notes)
    model = media_model(options, resolve_mixers(model, options, notes), notes)
    model = _resolve_length(options, _resolve_quantization(options, model), notes)
    chunk = _resolve_chunk(options, device, dtype, notes)
    memory, share = _resolve_memory(options, machine, device, notes)
    speculation = resolve_speculation(options, model, notes)
    if speculation is not None and speculation.algorithm == NEXTN:
        model = replace(model, draft=model.draft_layer)
    model, balance = resolve_experts(options, model, options.tensor_parallel_size, notes)
    return EngineConfig(
        model=model,
        dtype=dtype,
        kv_cache_dtype=_resolve_kv_dtype(options, dtype),
        device=device,
        page_size=page_size,
        seed=options.seed,
        max_num_seqs=options.max_num_seqs,
        chunked_prefill_size=chunk,
        itl_target_ms=options.itl_target_ms,
        enable_prefix_caching=options.enable_prefix_caching,
        load_format=options.load_format,
        kv_cache_memory=memory,
        gpu_memory_utilization=share,
        disable_cuda_graph=options.disable_cuda_graph,
        disable_overlap_schedule=options.disable_overlap_schedule,
        tensor_parallel_size=options.tensor_parallel_size,
        balance=balance,
        nodes=resolve_nodes(options, options.tensor_parallel_size, os.environ),
        kv_host_memory=(host_memory := _resolve_host_memory(options)),
        kv_host_tier=_resolve_host_tier(options, model),
        disaggregation=resolve_disaggregation(
            options,
            host_memory,
            _bytes("disaggregation_staging_size", options.disaggregation_staging_size),
            os.environ,
        ),
        speculation=speculation,
        media=resolve_media(options),
        choices=tuple(notes.choices),
        warnings=tuple(notes.warnings),
    )


def _resolve_dtype(
    options: EngineOptions, model: ModelSpec, machine: Machine, device: str, notes: Notes
) -> str:
    no_bf16 = device.startswith("cuda") and not machine.native_bf16
    if options.dtype != "auto":
        if options.dtype == "bfloat16" and no_bf16:
            raise BadConfig("dtype is bfloat16, which this GPU does not have", "Use float32")
        if options.dtype == "float16" and model.dtype == "bfloat16":
            notes.warn("dtype=float16 for a bfloat16 checkpoint: beyond 65504 is infinity")
        return options.dtype
    if no_bf16 and model.dtype == "bfloat16":
        notes.chose("dtype", "float32", "this GPU has no bfloat16")
        return "float32"
    if device == "cpu" and model.dtype != "float32" and not machine.native_bf16:
        notes.chose("dtype", "float32", f"this CPU has no matrix unit for {model.dtype}")
        return "float32"
    if device == "cpu" and model.dtype == "float16":
        notes.chose("dtype", "bfloat16", "CPUs multiply bfloat16, not float16")
        return "bfloat16"
    notes.chose("dtype", model.dtype, "the checkpoint says so")
    return model.dtype


def _resolve_length(options: EngineOptions, model: ModelSpec, notes: Notes) -> ModelSpec:
    asked = options.max_model_len
    if asked is None or not options.allow_long_max_model_len or asked <= model.max_model_len:
        return model
    notes.warn(f"max_model_len={asked}, but the model was made for {model.max_model_len} tokens")
    return replace(model, max_model_len=asked)


def _resolve_quantization(options: EngineOptions, model: ModelSpec) -> ModelSpec:
    if options.quantization == "auto":
        return model
    if options.quantization == "fp4":
        if model.quantization is None or model.quantization.experts != "fp4":
            raise BadConfig(
                "quantization is fp4, but the checkpoint has no experts in fp4", "Use auto"
            )
        return replace(model, quantization=replace(model.quantization, packed=True))
    if model.quantization is not None:
        raise BadConfig(
            f"quantization is {options.quantization}, but the checkpoint is quantised already",
            "Use auto",
        )
    return replace(model, quantization=QuantizationSpec("on_load"))


def _resolve_kv_dtype(options: EngineOptions, dtype: str) -> str:
    """Dtype of the cache: the engine's dtype, or one of SMALL_KV_DTYPES."""
    if options.kv_cache_dtype == "bf16" and dtype != "bfloat16":
        raise BadConfig(
            f"kv_cache_dtype is bf16, but dtype is {dtype}",
            f"Use auto, {' or '.join(SMALL_KV_DTYPES)}",
        )
    return options.kv_cache_dtype if options.kv_cache_dtype in SMALL_KV_DTYPES else dtype


def _resolve_memory(
    options: EngineOptions, machine: Machine, device: str, notes: Notes
) -> tuple[int | None, float | None]:
    """Bytes of the page pool, or the share of a GPU's memory for weights, activations and pages."""
    memory = _bytes("kv_cache_memory", options.kv_cache_memory)
    share = options.gpu_memory_utilization
    if not device.startswith("cuda"):
        if share is not None:
            raise BadConfig(
                f"gpu_memory_utilization is {share}, but the device is {device}",
                "Use kv_cache_memory (--kv-cache-memory)",
            )
        if memory is None:
            memory = int(machine.free_memory * HOST_SHARE) // options.tensor_parallel_size
            told = f"{memory / GIB:.2f}GiB"
            notes.chose("kv_cache_memory", told, "a share of the free memory")
    elif memory is None and share is None:
        share = 0.9
        reason = "the default; the rest is room for what cannot be foreseen"
        notes.chose("gpu_memory_utilization", share, reason)
    return memory, share


def _resolve_page_size(options: EngineOptions, model: ModelSpec, notes: Notes) -> int:
    if model.page_size is None:
        if options.page_size is None:
            notes.chose("page_size", 64, "the default for a model without landmarks")
        return options.page_size or 64
    if options.page_size not in (None, model.page_size):
        raise BadConfig(
            f"page_size is {options.page_size}, but a page must be a chunk of the model "
            f"(chunk_size {model.page_size})",
            f"Use --page-size {model.page_size} or leave it out",
        )
    notes.chose("page_size", model.page_size, "it is the model's chunk size")
    return model.page_size


def _resolve_chunk(options: EngineOptions, device: str, dtype: str, notes: Notes) -> int:
    if options.chunked_prefill_size is not None:
        return options.chunked_prefill_size
    chunk = GPU_CHUNK if device.startswith("cuda") else CPU_CHUNKS[dtype]
    # Step sizes must not depend on measured times by default, so that runs are reproducible.
    reason = f"the default on {device} in {dtype}; "
    fixed = options.itl_target_ms is None
    reason += "no itl_target_ms asks for smaller chunks" if fixed else "cut to fit itl_target_ms"
    notes.chose("chunked_prefill_size", chunk, reason)
    return chunk


def _resolve_host_memory(options: EngineOptions) -> int:
    asked = _bytes("kv_host_memory", options.kv_host_memory)
    if asked is not None and not (options.enable_prefix_caching or options.kv_host_tier):
        raise BadConfig(
            f"kv_host_memory is {options.kv_host_memory!r}, which keeps pages of the prefix cache, "
            "but enable_prefix_caching is false",
            "Leave one of the two out",
        )
    return asked or 0


def _resolve_host_tier(options: EngineOptions, model: ModelSpec) -> bool:
    if not options.kv_host_tier:
        return False
    if not any(mixer.backend == HSA for mixer in model.mixers):
        raise BadConfig(
            "kv_host_tier is true, but no layer of this model selects pages by landmarks",
            "Leave it out: kv_host_memory alone keeps what the prefix cache gives up",
        )
    if options.kv_host_memory is None:
        raise BadConfig(
            "kv_host_tier is true, but kv_host_memory gives no memory for pages",
            "Set kv_host_memory (--kv-host-memory)",
        )
    if options.disaggregation_mode is not None:
        raise BadConfig(
            "kv_host_tier is true, but pages that go to other engines are those of the host prefix "
            "cache",
            "Leave out kv_host_tier or disaggregation_mode",
        )
    return True


def _bytes(name: str, value: int | str | None) -> int | None:
    if value is None:
        return None
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9.]+)\s*([KMGT]i?B?|B)?\s*", value, re.IGNORECASE)
        try:
            number = float(match[1]) if match else -1.0
        except ValueError:
            number = -1.0
        if match is None or number <= 0:
            raise BadConfig(f"{name} is {value!r}", "Write bytes or a size such as 4GiB")
        unit = (match[2] or "B").upper()
        base = 1024 if "I" in unit or len(unit) == 1 else 1000
        value = int(number * base ** " KMGT".index(unit[0])) if unit != "B" else int(number)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise BadConfig(f"{name} is {value!r}", "Write bytes or a size such as 4GiB")
    return value


def _one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise BadConfig(f"{name} is {value!r}", f"Choose one of {', '.join(known)}")


def _check_target(target: object, chunk: int | None) -> None:
    """Raise BadConfig for an itl_target_ms that is not positive, or is given with a chunk size."""
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
    """Raise BadConfig for a share outside (0, 1], or one given with a size of the page pool."""
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
