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
from cairn.runner.device_records import DeviceRecords
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
    asked, what = config.kv_host_memory, "kv_host_memory is"
    if config.kv_host_tier:
        asked, what = plan.host_bytes, f"{plan.num_pages} pages in host memory take"
    if config.device == "cpu":
        free -= sum(count for _, count in plan.table(0, None))
    if asked > free:
        raise OutOfMemory(
            f"{what} {asked} bytes, but {free} bytes of host memory are free",
            f"Set {HOST_FLAG} to at most {max(0, free)}",
        )
    host_counts(config, schema, plan)


def host_counts(config: EngineConfig, schema: CacheSchema, plan: MemoryPlan) -> tuple[int, ...]:
    """Number of records by kind, in proportion to the pages on the device; none where the pages
    themselves are in host memory.

    Raises:
        BadConfig: not one record of each kind fits, or no record has bytes.
    """
    name = "disaggregation_staging_size" if config.staging else "kv_host_memory"
    flag = f"{name} (--{name.replace('_', '-')})"
    asked = config.staging or config.kv_host_memory
    if not asked or config.kv_host_tier:
        return 0, 0, 0
    sizes = [layout.nbytes for layout in layouts(schema)]
    on_device = plan.num_pages, plan.window_pages, plan.snapshots
    total = sum(count * size for count, size in zip(on_device, sizes, strict=True))
    if not total:
        raise BadConfig(
            f"{name} is {asked}, but what this model keeps of a prefix on the device is nothing",
            f"Leave {flag} out",
        )
    counts = tuple(asked * count // total for count in on_device)
    if any(count and not found for count, found in zip(on_device, counts, strict=True)):
        least = -(-total // min(count for count in on_device if count))
        raise BadConfig(
            f"{name} is {asked}, which does not hold one page with what is beside it",
            f"Set {flag} to at least {least}",
        )
    return counts


def host_records(
    config: EngineConfig, plan: MemoryPlan, pools: CachePools, group: Group
) -> HostRecords | DeviceRecords | None:
    """The memory for a rank's records; None: not used."""
    counts = host_counts(config, pools.schema, plan)
    if not any(counts):
        return None
    said = zip(counts, ("pages", "window pages", "states"), strict=True)
    held = ", ".join(f"{count} {name}" for count, name in said if count)
    if config.staging:
        log.info("records on the GPU: %s in %s", held, gib(config.staging))
        return DeviceRecords(pools, counts)
    log.info("host prefix cache: %s in %s", held, gib(config.kv_host_memory))
    shared = config.disaggregation is not None and not group.alone
    return HostRecords(pools, counts, group, shared)


def host_cache(records: HostRecords | DeviceRecords | None, executor: Executor) -> HostCache | None:
    """The ledger of these records; the executor moves them."""
    if records is None:
        return None
    # Records in GPU memory are for transfers alone: evicted pages are not worth that memory.
    spills = isinstance(records, HostRecords)
    return HostCache(records.counts, executor.move, spills=spills)
