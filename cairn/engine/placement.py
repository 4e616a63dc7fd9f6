"""What one of several engines takes of the machine that they share."""

from __future__ import annotations

import os
from dataclasses import replace

from cairn.config import HOST_SHARE, EngineOptions
from cairn.engine.messages import Launch
from cairn.errors import BadConfig

THREADS_VARIABLE = "OMP_NUM_THREADS"


def share_threads(replicas: int) -> None:
    """Let this process use its share of the cores; call before torch is imported. The user's
    OMP_NUM_THREADS is each engine's own."""
    if replicas > 1:
        cores = len(os.sched_getaffinity(0))
        os.environ.setdefault(THREADS_VARIABLE, str(max(1, cores // replicas)))


def placed(launch: Launch) -> EngineOptions:
    """The options of this engine: GPUs of its own, or its share of the host's memory.

    Raises:
        BadConfig: fewer GPUs than the engines take, or a GPU that they would share.
    """
    import torch

    from cairn.engine.build import free_host_memory

    options, replicas = launch.options, launch.replicas
    ranks = options.tensor_parallel_size
    if replicas == 1:
        return options
    gpus = torch.cuda.device_count() if options.device != "cpu" else 0
    if gpus == 0:
        if options.gpu_memory_utilization is not None:
            # Refused when the options are resolved.
            return options
        share = int(free_host_memory() * HOST_SHARE) // (replicas * ranks)
        memory = options.kv_cache_memory or share
        return replace(options, kv_cache_memory=memory)
    if ":" in options.device:
        raise BadConfig(
            f"device is {options.device!r}, but data_parallel_size is {replicas}, and each replica "
            "takes GPUs of its own",
            "Use auto, and choose the GPUs by CUDA_VISIBLE_DEVICES",
        )
    if gpus < replicas * ranks:
        raise BadConfig(
            f"data_parallel_size {replicas} with tensor_parallel_size {ranks} takes "
            f"{replicas * ranks} GPUs, but there are {gpus}",
            "Lower one of them",
        )
    return replace(options, device=f"cuda:{launch.replica * ranks}")
