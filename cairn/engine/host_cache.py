"""Sizes and builds the host prefix cache (`cairn.cache.host`)."""

from __future__ import annotations

import logging

from cairn.cache.host import HostCache
from cairn.cache.pools import CachePools
from cairn.cache.record import layouts
from cairn.cache.schema import CacheSchema
from cairn.config import EngineConfig
from cairn.distributed.groups import Group
from cairn.engine.memory import HOST_FLAG, MemoryPlan, gib
from cairn.errors import BadConfig, OutOfMemory
from cairn.runner.executor import Executor
from cairn.runner.host_records import HostRecords

log = logging.getLogger(__name__)


def check_host_cache(
    config: EngineConfig, schema: CacheSchema, plan: MemoryPlan, free: int
) -> None:
    """Check the size of the host cache: that the host has the memory (which the OS would only
    notice at the first write), and that it holds at least one record.

    Args:
        free: bytes of host memory that are free, before pages on the CPU take theirs.

    Raises:
        OutOfMemory: naming the largest size.
        BadConfig: naming the smallest.
    """
    asked = plan.host_bytes if config.kv_host_tier else config.kv_host_memory
    pages = sum(count for _, count in plan.table(0, None)) if config.device == "cpu" else 0
    if asked > free - pages:
        raise OutOfMemory(
            f"kv_host_memory is {asked}, but {free - pages} bytes of host memory are free",
            f"Set {HOST_FLAG} to at most {max(0, free - pages)}",
        )
    host_counts(config, schema, plan)


def host_counts(config: EngineConfig, schema: CacheSchema, plan: MemoryPlan) -> tuple[int, ...]:
    """Number of records in host memory by kind, in proportion to those on the device; none where
    the pages themselves are in host memory.

    Raises:
        BadConfig: not one record of each kind fits, or no record has bytes.
    """
    asked = config.kv_host_memory
    if not asked or config.kv_host_tier:
        return 0, 0, 0
    sizes = [layout.nbytes for layout in layouts(schema)]
    on_device = plan.num_pages, plan.window_pages, plan.snapshots
    total = sum(count * size for count, size in zip(on_device, sizes, strict=True))
    if not total:
        raise BadConfig(
            "kv_host_memory is set, but what this model keeps of a prefix on the device is nothing",
            f"Leave {HOST_FLAG} out",
        )
    counts = tuple(asked * count // total for count in on_device)
    if any(count and not found for count, found in zip(on_device, counts, strict=True)):
        least = -(-total // min(count for count in on_device if count))
        raise BadConfig(
            f"kv_host_memory is {asked}, which does not hold one page with what is beside it",
            f"Set {HOST_FLAG} to at least {least}",
        )
    return counts


def host_records(
    config: EngineConfig, plan: MemoryPlan, pools: CachePools, group: Group
) -> HostRecords | None:
    """The host memory for a rank's records; None: not used."""
    counts = host_counts(config, pools.schema, plan)
    if not any(counts):
        return None
    said = zip(counts, ("pages", "window pages", "states"), strict=True)
    held = ", ".join(f"{count} {name}" for count, name in said if count)
    log.info("host prefix cache: %s in %s", held, gib(config.kv_host_memory))
    shared = config.disaggregation is not None and not group.alone
    return HostRecords(pools, counts, group, shared)


def host_cache(records: HostRecords | None, executor: Executor) -> HostCache | None:
    """The ledger of these records; the executor moves them."""
    return None if records is None else HostCache(records.counts, executor.move)
