"""From a model folder and options to a running engine, in process."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from cairn.attention.base import AttentionLayer, LandmarkRule
from cairn.attention.registry import cache_specs
from cairn.cache.landmarks import SlotMap
from cairn.cache.paged import PageCache
from cairn.cache.pools import CachePools, CacheSpec, PageFormat, window_reach
from cairn.cache.window import WindowPages
from cairn.config import (
    Choice,
    EngineConfig,
    EngineOptions,
    Machine,
    ModelFacts,
    resolve,
)
from cairn.engine.admission import CoreShape
from cairn.engine.compiling import compile_loops
from cairn.engine.core import EngineCore
from cairn.engine.host_memory import bound_kernel_caches, keep_freed_memory
from cairn.engine.memory import (
    Lines,
    MemoryPlan,
    PageBytes,
    Usage,
    check_host,
    gib,
    plan_memory,
    room_for_pages,
)
from cairn.engine.scheduler import Limits
from cairn.engine.tokenizer import Tokenizer, load_tokenizer
from cairn.errors import BadConfig
from cairn.models.registry import load_model, load_spec
from cairn.models.spec import ModelSpec
from cairn.models.weight_map import parameter_count
from cairn.runner.executor import InProcessExecutor
from cairn.runner.memory import Steps, measure
from cairn.runner.prefill_graphs import worthwhile
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
        table: (what, bytes) of everything in the device's memory.
    """

    core: EngineCore
    runner: Runner
    spec: ModelSpec
    config: EngineConfig
    memory: MemoryPlan
    slots: SlotMap
    table: Lines


def build(
    model: Path, options: EngineOptions, on_phase: Callable[[str], object] = lambda name: None
) -> Built:
    """Load a model folder and set an engine up around it.

    Args:
        model: the folder.
        options: what the user asked for.
        on_phase: called with "weights", "profile" (on a GPU, unless `kv_cache_memory` fixes the
            pages: steps of all sizes have been run and measured), "pages" and "tokenizer" when
            each is there.

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
    form = page_format(config)
    specs = cache_specs(layers)
    page_bytes = bytes_of_pages(form, specs)
    device = torch.device(config.device)
    slots = SlotMap(config.page_size, spec.landmarks)

    def planned(usage: Usage | None) -> MemoryPlan:
        return plan_memory(options, config, facts, page_bytes, room_for_pages(config, usage))

    on_gpu = device.type == "cuda"
    parameters = parameter_count(spec)
    usage = replace(gpu_usage(device), weights=parameters * dtype.itemsize) if on_gpu else None
    # On a GPU these are the most pages there can be: what steps take is not known yet.
    memory = planned(usage)
    announce(config.choices, config.warnings)
    if not on_gpu:
        begin_on_cpu(memory)
    random_seed = config.seed if config.load_format == "random" else None
    module = load_model(model, spec, dtype, device, random_seed=random_seed)
    on_phase("weights")
    shape = RunnerShape(
        num_rows=config.max_num_seqs,
        max_pages=slots.pages_for(memory.max_model_len),
        vocab_size=spec.vocab_size,
        slots=slots,
        graph_slots=min(config.chunked_prefill_size, worthwhile(parameters, layers)),
        windowed=page_bytes.window > 0,
    )
    with_graphs = on_gpu and not config.disable_cuda_graph
    if on_gpu:
        measured = (0, 0)
        if config.kv_cache_memory is None:
            steps = Steps(config.chunked_prefill_size, memory.max_model_len, with_graphs)
            measured = measure(module, layers, shape, steps, form, device)
            on_phase("profile")
        usage = gpu_usage(device, module.weight_bytes, *measured)
        memory = planned(usage)
        shape = replace(shape, max_pages=slots.pages_for(memory.max_model_len))
    table = memory.table(module.weight_bytes, usage)
    announce(memory.choices, ())
    log.info("memory: %s", ", ".join(f"{what} {gib(count)}" for what, count in table))
    pools = CachePools(specs, memory.num_pages, form, device, with_graphs, memory.window_pages)
    if not on_gpu:
        settle_on_cpu(dtype)
    runner = Runner(module, layers, pools, shape, device)
    on_phase("pages")
    tokenizer = load_tokenizer(model)
    on_phase("tokenizer")
    core = EngineCore(
        core_shape(spec, config, layers, memory.max_model_len, tokenizer),
        limits_of(config),
        page_cache(memory, slots, config.enable_prefix_caching, page_bytes.reach),
        slots,
        InProcessExecutor(runner),
        tokenizer,
        overlap=on_gpu and not config.disable_overlap_schedule,
    )
    return Built(core, runner, spec, config, memory, slots, table)


def limits_of(config: EngineConfig) -> Limits:
    """What a step may hold."""
    target = None if config.itl_target_ms is None else config.itl_target_ms / 1000
    return Limits(config.max_num_seqs, config.chunked_prefill_size, target)


def begin_on_cpu(memory: MemoryPlan) -> None:
    """What comes before the weights are read. Raises OutOfMemory, see `check_host`."""
    check_host(memory, free_host_memory())
    bound_kernel_caches()


def settle_on_cpu(dtype: torch.dtype) -> None:
    """Make this process ready for steps: its memory, and what it would compile in their midst."""
    keep_freed_memory()
    compile_loops(dtype)


def bytes_of_pages(form: PageFormat, specs: list[CacheSpec]) -> PageBytes:
    """What a page takes of the layers' memory."""
    return PageBytes(*form.bytes_by_pool(specs), window_reach(specs, form.page_size) or 0)


def page_cache(memory: MemoryPlan, slots: SlotMap, prefix_caching: bool, reach: int) -> PageCache:
    """The ledger of the planned pages; window layers' own reach back `reach` pages."""
    window = WindowPages(memory.window_pages, reach) if memory.window_pages else None
    return PageCache(memory.num_pages, slots, prefix_caching, window)


def page_format(config: EngineConfig) -> PageFormat:
    """How pages are stored."""
    dtype = getattr(torch, config.dtype)
    return PageFormat(config.page_size, dtype, quantized=config.kv_cache_dtype == "fp8_e4m3")


def core_shape(
    spec: ModelSpec,
    config: EngineConfig,
    layers: tuple[AttentionLayer, ...],
    max_model_len: int,
    tokenizer: Tokenizer | None,
) -> CoreShape:
    """What the loop must know of the model."""
    return CoreShape(
        vocab_size=spec.vocab_size,
        max_model_len=max_model_len,
        eos_ids=end_ids(spec, tokenizer),
        seed=config.seed,
        landmarks=any(layer.selects for layer in layers),
    )


def end_ids(spec: ModelSpec, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Ids that end an output: those of config.json, generation_config.json and the tokenizer.

    The files of one folder may disagree: a base model's config.json names the end of a document,
    while the tokenizer of its chat fine-tune names the end of a turn. Ids that the model cannot
    produce are left out.
    """
    ids = spec.eos_token_ids
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids += (tokenizer.eos_token_id,)
    return tuple(dict.fromkeys(token for token in ids if token < spec.vocab_size))


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


def gpu_usage(
    device: torch.device, weights: int = 0, activations: int = 0, graphs: int = 0
) -> Usage:
    """What a GPU holds: `weights` bytes of weights that are there, steps to come, and the rest."""
    # An engine that was dropped may not be collected yet, and its memory may wait for reuse.
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return Usage(total, total - free - weights, weights, activations, graphs)


def this_machine(device: str = "auto") -> Machine:
    """What option resolution must know of the machine; `device` says what will be used of it."""
    has_cuda = torch.cuda.is_available()
    if not has_cuda or device == "cpu":
        return Machine(has_cuda, native_bf16(), free_host_memory())
    index = int(device.partition(":")[2] or 0)
    if index >= torch.cuda.device_count():
        raise BadConfig(
            f"device is {device!r}, but there are {torch.cuda.device_count()} CUDA devices",
            "Devices are numbered from 0",
        )
    has_bf16 = torch.cuda.get_device_capability(index) >= (8, 0)
    return Machine(has_cuda, has_bf16, torch.cuda.mem_get_info(index)[0])


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
