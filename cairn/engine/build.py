"""Builds an engine in this process from a model folder and options."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from cairn.attention.registry import cache_schema, most_pages
from cairn.cache.host import HostCache
from cairn.cache.landmarks import SlotMap
from cairn.cache.paged import PageCache
from cairn.cache.pools import CachePools, PoolSizes
from cairn.cache.schema import LINEAR, PRESHUFFLED, CacheSchema, PageFormat
from cairn.cache.states import StateSnapshots
from cairn.cache.window import WindowPages
from cairn.config import EngineConfig, EngineOptions, Machine, resolve
from cairn.distributed.groups import ALONE, Group
from cairn.distributed.rounds import Rounds
from cairn.engine.admission import CoreShape
from cairn.engine.balance import BalancingExecutor
from cairn.engine.core import EngineCore
from cairn.engine.drafts import HeadDrafter, NgramDrafter
from cairn.engine.host_cache import check_host_cache, host_cache, host_records
from cairn.engine.host_memory import bound_kernel_caches, keep_freed_memory
from cairn.engine.memory import (
    Lines,
    MemoryPlan,
    PageBytes,
    Usage,
    check_host,
    check_pages,
    gib,
    plan_memory,
    room_for_pages,
)
from cairn.engine.pace import Pace
from cairn.engine.placement import check_devices, check_engines
from cairn.engine.planned_step import Limits
from cairn.engine.ranks import Ranks, device_of, threads_of_rank
from cairn.engine.rounds import Engines, ExpertRounds, RoundsExecutor
from cairn.engine.tokenizer import Tokenizer, load_tokenizer
from cairn.engine.transfer.build import listen, transfers
from cairn.engine.transfer.identity import Identity
from cairn.engine.transfer.joined import JoinedRecords, Records
from cairn.engine.transfer.sender import Listener
from cairn.engine.trees import Trees
from cairn.errors import BadConfig, EngineDead
from cairn.models.registry import load_model, load_spec, measure_weights
from cairn.models.sharding import local
from cairn.ops.compile_loops import compile_loops
from cairn.runner.executor import Executor, InProcessExecutor, RanksExecutor
from cairn.runner.experts import ExpertBalance
from cairn.runner.host_records import HostRecords
from cairn.runner.memory import NO_STEPS, Measured, Steps, measured
from cairn.runner.prefill_graphs import worthwhile
from cairn.runner.runner import Runner, RunnerShape
from cairn.specs.choice import Choice
from cairn.specs.kv_format import KV_FORMATS
from cairn.specs.model import ELEMENT_SIZE, ModelSpec
from cairn.specs.speculation import NGRAM

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Built:
    """An engine and its resolved options.

    Attributes:
        core: the loop.
        runner: the model with its pages.
        spec: the model, with the options of its mixers applied.
        config: resolved options.
        memory: pages and context length.
        slots: slot arithmetic.
        table: (what, bytes) of everything in the device's memory.
        rounds: rounds of engines that share experts; None: this engine has all experts.
    """

    core: EngineCore
    runner: Runner
    spec: ModelSpec
    config: EngineConfig
    memory: MemoryPlan
    slots: SlotMap
    table: Lines
    rounds: ExpertRounds | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """One rank's share of a model, ready to run.

    Attributes:
        executor: runs the model with its pages.
        memory: pages and context length, the same on all ranks.
        schema: what pages hold.
        table: (what, bytes) of everything in the device's memory.
        rounds: see `Built`.
    """

    executor: InProcessExecutor
    memory: MemoryPlan
    schema: CacheSchema
    table: Lines
    rounds: ExpertRounds | None = None


def build(
    model: Path,
    options: EngineOptions,
    on_phase: Callable[[str], object] = lambda name: None,
    start: Callable[[EngineConfig], Ranks] | None = None,
    engines: Engines | None = None,
) -> Built:
    """Load a model folder and set an engine up around it.

    Args:
        model: the folder.
        options: what the user asked for.
        on_phase: called with "weights", "profile" (on a GPU, unless `kv_cache_memory` fixes the
            pages: steps of all sizes have been run and measured), "pages" and "tokenizer" when
            each is there.
        start: starts the other ranks, where there are several; None: `ranks_of`.
        engines: the engines that share experts with this one; None: experts are not shared.

    Raises:
        BadModel: the folder cannot be served.
        BadConfig: an option that is impossible for this model or machine.
        OutOfMemory: the weights or the pages do not fit.
        EngineDead: another rank has ended.
    """
    config = resolve(options, load_spec(model), this_machine(options.device))
    size = config.tensor_parallel_size
    if ":" in config.device:
        # Streams and Triton kernels use the current device.
        torch.cuda.set_device(config.device)
    # Checked before any process is started.
    local(config.model, size)
    if config.nodes is not None and config.nodes.number:
        raise BadConfig(
            f"node_rank is {config.nodes.number}, but node 0 has the engine",
            "Start `cairn serve` with it, which serves the ranks of this host",
        )
    check_engines(config, options.expert_engines, 1 if engines is None else engines.group.size)
    listener = listen(config)
    if size == 1:
        loaded = load_runner(model, options, config, ALONE, on_phase, engines)
        built = _assemble(model, config, loaded, None, on_phase)
        connect(built.core, model, config, loaded, listener)
        return built
    check_devices(config)
    if config.device == "cpu":
        torch.set_num_threads(min(torch.get_num_threads(), threads_of_rank(config.ranks_here)))
    ranks = (start or ranks_of)(config)
    with ranks.explained():
        ranks.load(model, settled(options, config))
        loaded = load_runner(model, options, config, ranks.group, on_phase)
        built = _assemble(model, config, loaded, ranks, on_phase)
        connect(built.core, model, config, loaded, listener)
        return built


def ranks_of(
    config: EngineConfig,
    on_death: Callable[[EngineDead], object] = lambda error: None,
    listener: int | None = None,
) -> Ranks:
    """Start the other ranks; see `Ranks`."""
    size, device = config.tensor_parallel_size, torch.device(config.device)
    return Ranks(size, device, on_death, config.nodes, listener)


def settled(options: EngineOptions, config: EngineConfig) -> EngineOptions:
    """The options with every automatic choice fixed that could differ in another process."""
    return replace(
        options, dtype=config.dtype, device=config.device, kv_cache_memory=config.kv_cache_memory
    )


def load_runner(
    model: Path,
    options: EngineOptions,
    config: EngineConfig,
    group: Group,
    on_phase: Callable[[str], object] = lambda name: None,
    engines: Engines | None = None,
) -> Loaded:
    """Load this rank's share of a model; all ranks of the group do at the same time.

    Args:
        model, options, on_phase, engines: see `build`.
        config: the resolved options.
        group: the ranks.
    """
    spec = local(config.model, group.size)
    dtype = getattr(torch, config.dtype)
    form = page_format(config)
    schema = cache_schema(spec.mixers, form)
    page_bytes = PageBytes.of(schema)
    device = torch.device(config.device)
    device = device if group.alone else device_of(device, group.local)
    slots = SlotMap(config.page_size, spec.landmarks)

    def planned(usage: Usage | None) -> MemoryPlan:
        room = room_for_pages(config, usage)
        room = replace(room, bytes=group.least(room.bytes, device))
        return plan_memory(options, config, spec, page_bytes, room)

    on_gpu = device.type == "cuda"
    parameters, weight_bytes = measure_weights(spec, dtype, group)
    usage = None
    if on_gpu:
        usage = replace(gpu_usage(device), weights=weight_bytes, records=config.staging)
    # On a GPU an upper bound of the number of pages: the memory of steps is not measured yet.
    memory = planned(usage)
    if group.rank == 0:
        announce(config.choices, config.warnings)
    if on_gpu:
        check_pages(memory, slots, most_pages(spec.mixers))
    else:
        begin_on_cpu(memory, group.size_here)
    check_host_cache(config, schema, memory, free_host_memory() // group.size_here)
    random_seed = config.seed if config.load_format == "random" else None
    rounds = None if engines is None else Rounds(engines.group)
    module = load_model(
        model, config.model, dtype, device, random_seed=random_seed, group=group, rounds=rounds
    )
    on_phase("weights")
    shape = runner_shape(config, memory, slots, parameters)
    with_graphs = on_gpu and not config.disable_cuda_graph
    if on_gpu:
        taken = NO_STEPS
        if config.kv_cache_memory is None:
            steps = Steps(config.chunked_prefill_size, memory.max_model_len, with_graphs)
            taken = measured(module, spec, shape, steps, form, device)
            on_phase("profile")
        usage = replace(gpu_usage(device, module.weight_bytes, taken), records=config.staging)
        memory = planned(usage)
        shape = replace(shape, max_pages=slots.pages_for(memory.max_model_len))
    table = memory.table(module.weight_bytes, usage)
    if group.rank == 0:
        announce(memory.choices, ())
        log.info("memory: %s", ", ".join(f"{what} {gib(count)}" for what, count in table))
    sizes = PoolSizes(memory.group_pages, config.max_num_seqs, memory.snapshots, memory.frames)
    pools = CachePools(schema, sizes, device, with_graphs)
    if on_gpu and pools.frames is not None:
        memory = memory.with_host_rate(pools.frames.fill_rate())
        announce(memory.choices[-1:] if group.rank == 0 else (), ())
    if not on_gpu:
        settle_on_cpu(dtype)
    runner = Runner(module, spec.mixers, pools, shape, device, group)
    if config.balance is not None:
        runner.experts = ExpertBalance(module, group)
    records = host_records(config, memory, pools, group)
    on_phase("pages")
    shared = None
    if rounds is not None and engines is not None:
        shared = ExpertRounds(rounds, module, engines)
    return Loaded(InProcessExecutor(runner, records), memory, schema, table, shared)


def _assemble(
    model: Path,
    config: EngineConfig,
    loaded: Loaded,
    ranks: Ranks | None,
    on_phase: Callable[[str], object],
) -> Built:
    """Build the engine around a loaded model."""
    runner, memory, on_gpu = loaded.executor.runner, loaded.memory, config.device != "cpu"
    slots = runner.shape.slots
    tokenizer = load_tokenizer(model)
    on_phase("tokenizer")
    executor: Executor = loaded.executor
    if ranks is not None:
        executor = RanksExecutor(loaded.executor, ranks)
    if loaded.rounds is not None:
        executor = RoundsExecutor(executor, loaded.rounds)
    if config.balance is not None and runner.experts is not None:
        executor = BalancingExecutor(executor, config.balance, runner.experts.layers)
    host = host_cache(loaded.executor.records, executor)
    core = EngineCore(
        core_shape(config, memory.max_model_len, tokenizer),
        limits_of(config),
        page_cache(memory, slots, config, loaded.schema, host),
        slots,
        executor,
        tokenizer,
        overlap=on_gpu and not config.disable_overlap_schedule,
    )
    guess(core, config)
    return Built(core, runner, config.model, config, memory, slots, loaded.table, loaded.rounds)


def connect(
    core: EngineCore, model: Path, config: EngineConfig, loaded: Loaded, listener: Listener | None
) -> None:
    """Set up the exchange of records with other engines, as the options say."""
    records, host, asked = loaded.executor.records, core.cache.host, config.disaggregation
    if asked is not None and records is not None and host is not None:
        whole = cache_schema(config.model.mixers, page_format(config))
        identity = Identity.of(model, config, whole)
        host.root = identity.key
        travelling: Records = records
        if isinstance(records, HostRecords) and records.memories:
            travelling = JoinedRecords(records, whole, loaded.schema)
        core.transfers = transfers(asked, core.cache, travelling, listener, identity)


def guess(core: EngineCore, config: EngineConfig) -> None:
    """Set up speculative decoding as the options say."""
    asked = config.speculation
    if asked is not None:
        looking_up = asked.algorithm == NGRAM
        ngram, head = NgramDrafter(asked.drafts, *asked.match), HeadDrafter(asked.drafts)
        core.scheduler.drafter = ngram if looking_up else head
        core.scheduler.pace = Pace(core.times, asked.drafts)
        pages = int(core.scheduler.slots.pages_for(core.shape.max_model_len))
        # Branches have pages of their own, but no recurrent states and no window pages.
        if asked.branches > 1 and core.cache.states is None and core.cache.window is None:
            brancher = ngram if looking_up else head
            core.scheduler.trees = Trees(brancher, asked.branches, core.scheduler.slots, pages)


def limits_of(config: EngineConfig) -> Limits:
    """What a step may hold."""
    target = None if config.itl_target_ms is None else config.itl_target_ms / 1000
    return Limits(config.max_num_seqs, config.chunked_prefill_size, target)


def begin_on_cpu(memory: MemoryPlan, ranks: int) -> None:
    """Checks before weights are loaded. Raises OutOfMemory, see `check_host`."""
    check_host(memory, free_host_memory() // ranks)
    bound_kernel_caches()


def settle_on_cpu(dtype: torch.dtype) -> None:
    """Set up allocators and compile kernels before the first step."""
    keep_freed_memory()
    compile_loops(dtype)


def page_cache(
    memory: MemoryPlan,
    slots: SlotMap,
    config: EngineConfig,
    schema: CacheSchema,
    host: HostCache | None = None,
) -> PageCache:
    """The ledger of the planned pages and states."""
    window = None
    if memory.window_pages and schema.reach is not None:
        window = WindowPages(memory.window_pages, schema.reach)
    states = None
    if schema.has_rows:
        interval = snapshot_interval(schema, config.chunked_prefill_size // slots.page_size)
        states = StateSnapshots(memory.snapshots, interval)
    prefix_caching = config.enable_prefix_caching
    return PageCache(memory.num_pages, slots, prefix_caching, window, states, host)


def snapshot_interval(schema: CacheSchema, step_pages: int) -> int:
    """Pages between snapshots of a long prompt: the first power of two above the pages that take as
    much memory as one state; denser ones would take more than the pages. At least about half of the
    pages that a step computes: a step ends at each snapshot, and the host takes as long for a short
    step as for a long one."""
    page = sum(group.page_bytes for group in schema.groups)
    worth = -(-schema.row_bytes // page) if page else 1
    return 1 << max(worth.bit_length(), (step_pages // 2).bit_length() - 1)


def runner_shape(
    config: EngineConfig, memory: MemoryPlan, slots: SlotMap, parameters: int
) -> RunnerShape:
    """Sizes of the runner; `parameters` is the model's number of parameters."""
    spec, size = config.model, ELEMENT_SIZE[config.dtype]
    counted = spec.num_layers + len(spec.selecting_layers)
    shape = RunnerShape(
        num_rows=config.max_num_seqs,
        max_pages=slots.pages_for(memory.max_model_len),
        vocab_size=spec.vocab_size,
        slots=slots,
        graph_slots=min(config.chunked_prefill_size, worthwhile(parameters, counted)),
        drafts=0 if config.speculation is None else config.speculation.drafts,
        branches=1 if config.speculation is None else config.speculation.branches,
    )
    if spec.vision is None:
        return shape
    media = spec.vision.media
    # Twice the embeddings of the largest image.
    kept = 2 * media.most_tokens * spec.hidden_size * size
    sides = tuple(media.square_sides(memory.max_model_len))
    return replace(shape, encoder_bytes=kept, image_sides=sides, axes=media.axes)


def page_format(config: EngineConfig) -> PageFormat:
    """The storage format of pages."""
    dtype = getattr(torch, config.dtype)
    # The operand layout of AMD's matrix instructions; slower on NVIDIA GPUs.
    layout = PRESHUFFLED if torch.version.hip and config.device != "cpu" else LINEAR
    return PageFormat(
        config.page_size,
        dtype,
        kv=KV_FORMATS.get(config.kv_cache_dtype),
        small_records=config.kv_cache_dtype == "fp8_ds",
        index_layout=layout,
        in_host=config.kv_host_tier,
    )


def core_shape(config: EngineConfig, max_model_len: int, tokenizer: Tokenizer | None) -> CoreShape:
    """The model's limits that the loop needs."""
    spec = config.model
    return CoreShape(
        vocab_size=spec.vocab_size,
        max_model_len=max_model_len,
        eos_ids=end_ids(spec, tokenizer),
        seed=config.seed,
        selects=bool(spec.selecting_layers),
        media=None if spec.vision is None else spec.vision.media,
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


def gpu_usage(device: torch.device, weights: int = 0, steps: Measured = NO_STEPS) -> Usage:
    """Memory in use on a GPU: `weights` bytes of loaded weights, memory of steps to come, and the
    rest."""
    # A dropped engine may not be garbage-collected yet, and its memory may be cached by the
    # allocator.
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - weights + steps.kept
    return Usage(total, others, weights, steps.activations, steps.graphs)


def this_machine(device: str = "auto") -> Machine:
    """Properties of the machine for option resolution; `device` says which device will be used."""
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
