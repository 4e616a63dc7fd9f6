"""Shares of a machine's cores, memory and GPUs among several engines or ranks."""

from __future__ import annotations

import os
from dataclasses import replace

from cairn.config import HOST_SHARE, EngineConfig, EngineOptions
from cairn.engine.messages import Launch
from cairn.errors import BadConfig
from cairn.specs.disaggregation import BOTH, PREFILL

THREADS, GPUS = "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"


def placed(launch: Launch) -> EngineOptions:
    """Restrict this process to its engine's share of the machine: cores, and GPUs or a part of the
    host's memory.

    Call it before torch is imported: the share is told by environment variables, which processes of
    further ranks inherit. The user's OMP_NUM_THREADS is that of each process.

    Returns:
        The options for `build`.

    Raises:
        BadConfig: fewer GPUs than the engines need, or engines that would share a GPU.
    """
    options, replicas = launch.options, launch.replicas
    ranks = options.tensor_parallel_size
    if launch.meeting is not None:
        options = _sharing(options, replicas, ranks)
    here = replicas * ranks // options.nnodes
    if here > 1:
        cores = len(os.sched_getaffinity(0))
        os.environ.setdefault(THREADS, str(max(1, cores // here)))
    if replicas == 1:
        return options
    if options.disaggregation_mode in (PREFILL, BOTH) and options.disaggregation_bootstrap_port:
        port = options.disaggregation_bootstrap_port + launch.replica
        options = replace(options, disaggregation_bootstrap_port=port)
    import torch

    # Counts GPUs without creating a CUDA context, so that CUDA_VISIBLE_DEVICES still has an effect.
    gpus = torch.cuda.device_count() if options.device != "cpu" else 0
    if gpus == 0:
        return _on_host(options, replicas * ranks)
    if ":" in options.device:
        raise BadConfig(
            f"device is {options.device!r}, but data_parallel_size is {replicas}, and each replica "
            "takes GPUs of its own",
            f"Use auto, and choose the GPUs by {GPUS}",
        )
    if gpus < replicas * ranks:
        raise BadConfig(
            f"data_parallel_size {replicas} with tensor_parallel_size {ranks} takes "
            f"{replicas * ranks} GPUs, but there are {gpus}",
            "Lower one of them",
        )
    named = os.environ.get(GPUS)
    names = named.split(",") if named else [str(i) for i in range(gpus)]
    first = launch.replica * ranks
    os.environ[GPUS] = ",".join(names[first : first + ranks])
    if torch.cuda.device_count() != ranks:
        raise BadConfig(
            f"replica {launch.replica} cannot be kept to GPUs {os.environ[GPUS]}",
            f"Start a server for each GPU, with {GPUS} in its environment",
        )
    return options


def check_devices(config: EngineConfig) -> None:
    """Raise BadConfig if there are fewer GPUs here than ranks."""
    import torch

    device, size = torch.device(config.device), config.ranks_here
    count = torch.cuda.device_count() - (device.index or 0)
    if device.type == "cuda" and size > count:
        raise BadConfig(
            f"tensor_parallel_size is {size}, but there are {count} GPUs from {config.device} on",
            f"Use at most {count}",
        )


def check_engines(config: EngineConfig, asked: int, engines: int) -> None:
    """Raise BadConfig if experts are to be shared with engines that are not there, or on GPUs.

    Args:
        asked: number of engines that the options ask for.
        engines: number of engines, including this one.
    """
    if asked != engines:
        raise BadConfig(
            f"expert_engines is {asked}, but experts are shared by {engines}",
            "Leave it out: --data-parallel-size of `cairn serve` sets it",
        )
    if engines > 1 and config.device != "cpu":
        raise BadConfig(
            f"replicas that share experts are built for a CPU alone, not for {config.device}",
            "Use --tensor-parallel-size with --enable-expert-parallel",
        )


def _sharing(options: EngineOptions, replicas: int, ranks: int) -> EngineOptions:
    """The options of an engine that shares experts with the other replicas."""
    if ranks > 1:
        raise BadConfig(
            f"tensor_parallel_size is {ranks} and data_parallel_size {replicas}, but replicas that "
            "share experts have one rank each",
            "Leave one of them out, or --enable-expert-parallel",
        )
    if options.ep_size not in (None, replicas):
        raise BadConfig(
            f"ep_size is {options.ep_size}, but experts are shared by {replicas} replicas",
            f"Use {replicas}, or leave it out",
        )
    return replace(options, expert_engines=replicas)


def _on_host(options: EngineOptions, parts: int) -> EngineOptions:
    from cairn.engine.build import free_host_memory

    if options.kv_cache_memory is not None or options.gpu_memory_utilization is not None:
        # The user's own choice, or what is refused when the options are resolved.
        return options
    return replace(options, kv_cache_memory=int(free_host_memory() * HOST_SHARE) // parts)
