"""Rendezvous of ranks: a store held by rank 0, and the process group created through it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from cairn.distributed.groups import Group

dist: Any = torch.distributed
"""Its stores and process groups have no types."""

LOOPBACK = "127.0.0.1"
START = timedelta(seconds=60)
"""Time limit for all ranks to join."""
STEP = timedelta(seconds=600)
"""Time limit of a collective: a rank may load weights or compile kernels before it."""

ROUND = timedelta(seconds=60)
"""Time limit for engines that share experts to join a round."""


def hold_store(host: str = LOOPBACK) -> Any:
    """The store of rank 0. The system chooses its port, so that none can be taken."""
    return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=START)


def join_store(host: str, port: int) -> Any:
    """The same store, on another rank."""
    return dist.TCPStore(host, port, is_master=False, timeout=START)


def group_of(
    store: Any,
    rank: int,
    size: int,
    device: torch.device,
    address: str = LOOPBACK,
    here: tuple[int, int] | None = None,
    limit: timedelta = STEP,
) -> Group:
    """The group of all ranks; returns when all of them have called it.

    Args:
        address: address of this host for other ranks.
        here: see `Group`.
        limit: time limit of a collective. The first one between GPUs connects them within START.
    """
    shared = dist.PrefixStore("group", store)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = START
        group = Group(rank, size, dist.ProcessGroupNCCL(shared, rank, size, options), here)
        group.least(0, device)
        group.backend.set_timeout(limit)
        return group
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = START
    ranks = dist.ProcessGroupGloo(shared, rank, size, options)
    ranks._set_default_timeout(limit)
    return Group(rank, size, ranks, here)


def group_of_engines(path: str, number: int, count: int) -> Group:
    """The group of engines that share experts, whose rendezvous is a new file; returns when all
    have called it."""
    store, cpu = dist.FileStore(path, count), torch.device("cpu")
    return group_of(store, number, count, cpu, limit=ROUND)
