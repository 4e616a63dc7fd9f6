"""From a model folder and options to a running engine, in process."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from cairn.attention.base import AttentionLayer, LandmarkRule
from cairn.attention.registry import cache_specs
from cairn.cache.landmarks import SlotMap
from cairn.cache.paged import PageCache
from cairn.cache.pools import CachePools, bytes_per_page
from cairn.config import (
    Choice,
    EngineConfig,
    EngineOptions,
    Machine,
    MemoryPlan,
    ModelFacts,
    plan_memory,
    resolve,
)
from cairn.engine.admission import CoreShape
from cairn.engine.core import EngineCore
from cairn.engine.host_memory import bound_kernel_caches, keep_freed_memory
from cairn.engine.scheduler import Limits
from cairn.engine.tokenizer import load_tokenizer
from cairn.models.registry import load_model, load_spec
from cairn.models.spec import ModelSpec
from cairn.runner.executor import InProcessExecutor
from cairn.runner.runner import Runner, RunnerShape

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Built:
    """An engine and what was decided for it.

    Attributes:
        core: the loop.
        runner: the model with its pages.
        spec: the model's geometry.
        config: resolved options.
        memory: pages and context length.
        slots: slot and landmark arithmetic.
        weight_bytes: memory of the weights.
    """

    core: EngineCore
    runner: Runner
    spec: ModelSpec
    config: EngineConfig
    memory: MemoryPlan
    slots: SlotMap
    weight_bytes: int


def build(
    model: Path, options: EngineOptions, on_phase: Callable[[str], object] = lambda name: None
) -> Built:
    """Load a model folder and set an engine up around it.

    Args:
        model: the folder.
        options: what the user asked for.
        on_phase: called with "weights", "pages" and "tokenizer" when each is there.

    Raises:
        BadModel: the folder cannot be served.
        BadConfig: an option that is impossible for this model or machine.
        OutOfMemory: the weights or the pages do not fit.
    """
    spec = load_spec(model)
    facts = model_facts(spec)
    config = resolve(options, facts, this_machine(options.device))
    layers = attention_layers(spec, config)
    dtype = getattr(torch, config.dtype)
    page_bytes = bytes_per_page(cache_specs(layers), config.page_size, dtype)
    memory = plan_memory(options, config, facts, page_bytes)
    announce(config.choices + memory.choices, config.warnings)

    random_seed = config.seed if config.load_format == "random" else None
    device = torch.device(config.device)
    if device.type == "cpu":
        bound_kernel_caches()
    module = load_model(model, spec, dtype, device, random_seed=random_seed)
    on_phase("weights")
    pools = CachePools(
        cache_specs(layers),
        memory.num_pages,
        config.page_size,
        dtype,
        device=device,
        spare=device.type == "cuda",
    )
    if device.type == "cpu":
        keep_freed_memory()
    slots = SlotMap(config.page_size, spec.landmarks)
    shape = RunnerShape(
        num_rows=config.max_num_seqs,
        max_pages=slots.pages_for(memory.max_model_len),
        vocab_size=spec.vocab_size,
        slots=slots,
    )
    runner = Runner(module, layers, pools, shape, device)
    on_phase("pages")
    tokenizer = load_tokenizer(model)
    on_phase("tokenizer")
    core = EngineCore(
        CoreShape(
            vocab_size=spec.vocab_size,
            max_model_len=memory.max_model_len,
            eos_ids=spec.eos_token_ids,
            seed=config.seed,
            landmarks=any(layer.backend == "hsa" for layer in layers),
        ),
        Limits(
            config.max_num_seqs,
            config.chunked_prefill_size,
            None if config.itl_target_ms is None else config.itl_target_ms / 1000,
        ),
        PageCache(memory.num_pages, slots, config.enable_prefix_caching),
        slots,
        InProcessExecutor(runner),
        tokenizer,
    )
    return Built(core, runner, spec, config, memory, slots, module.weight_bytes)


def attention_layers(spec: ModelSpec, config: EngineConfig) -> tuple[AttentionLayer, ...]:
    """Each layer as its backend sees it, with the backend that computes it."""
    rule = None
    if spec.hils is not None and config.topk is not None and config.window is not None:
        # The older strategies score a page by its landmark's own key, whatever the model pools.
        own_rule = config.strategy == "hils"
        rule = LandmarkRule(
            topk=config.topk,
            window=config.window,
            softmax1=spec.hils.softmax1,
            summary=spec.hils.summary if own_rule else "landmark",
            bias=spec.hils.bias and own_rule,
            group_query=spec.hils.group_query and own_rule,
            strategy=config.strategy,
        )
    layers = []
    for index, layer in enumerate(spec.layers):
        if layer.kind == "hils":
            backend = config.attention_backend if index in config.landmark_layers else "window"
        else:
            backend = "dense" if layer.window is None else "window"
        layers.append(
            AttentionLayer(
                index=index,
                backend=backend,
                num_heads=spec.num_heads,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                window=layer.window,
                mask_landmarks=layer.mask_landmarks,
                landmark=rule if layer.kind == "hils" else None,
            )
        )
    return tuple(layers)


def model_facts(spec: ModelSpec) -> ModelFacts:
    """What option resolution must know of the model."""
    return ModelFacts(
        page_size=spec.page_size,
        landmarks=spec.landmarks,
        landmark_id=spec.landmark_id,
        max_model_len=spec.max_model_len,
        dtype=spec.dtype,
        landmark_layers=spec.hils_layers,
        num_layers=spec.num_layers,
        topk=spec.hils.topk if spec.hils else None,
        window=spec.hils.window if spec.hils else None,
    )


def this_machine(device: str = "auto") -> Machine:
    """What option resolution must know of the machine; `device` says whose memory counts."""
    has_cuda = torch.cuda.is_available()
    on_cuda = has_cuda and device != "cpu"
    if on_cuda:
        index = int(device.partition(":")[2] or 0)
        free = torch.cuda.mem_get_info(index)[0]
    else:
        free = free_host_memory()
    return Machine(has_cuda, native_bf16(), free)


def free_host_memory() -> int:
    """Bytes of host memory that can be taken without swapping."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def native_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware."""
    for probe in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        check: Callable[[], bool] | None = getattr(torch.cpu, probe, None)
        if check is not None and check():
            return True
    return False


def announce(choices: tuple[Choice, ...], warnings: tuple[str, ...]) -> None:
    """Log every automatic choice with its reason, and every override that contradicts the model."""
    for choice in choices:
        log.info("%s", choice)
    for warning in warnings:
        log.warning("%s", warning)
