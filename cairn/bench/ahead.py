"""Parallel compilation before timing: worker processes on all cores run every size once.

They fill the disk caches of Triton and torch.compile for the process that measures. Their results
and errors are dropped; the measuring process gets the same ones.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cairn.bench import registered as _registered  # noqa: F401  (ops are found once imported)
from cairn.ops.bench_points import COMPILED, Draw, Point, points_of
from cairn.ops.registry import Op, all_ops
from cairn.ops.testing import runnable

log = logging.getLogger(__name__)

RESERVED_CORES = 2
"""Cores without a worker."""
MIN_OPS = 4
"""With fewer ops, starting processes takes longer than compiling in this one."""
MAX_SIZES = 64
"""Most sizes of an op."""
TIMEOUT = 75.0
"""Seconds after which the remaining kernels are left to the measuring process."""


def compile_ahead(ops: Sequence[Op[..., Any]], draw: Draw) -> None:
    """Compile the ops for all benchmark points of `draw`; does nothing for fewer than MIN_OPS ops
    or cores."""
    _set_up_compilers()
    count = min(len(os.sched_getaffinity(0)) - RESERVED_CORES, len(ops))
    if count < MIN_OPS:
        return
    began = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with context.Pool(count, torch.set_num_threads, (1,)) as pool:
        options = (draw.device, draw.dtype, draw.sizes)
        pending = [pool.apply_async(_run_sizes, (op.name, *options)) for op in ops]
        pool.close()
        missed = 0
        for result in pending:
            result.wait(max(0.0, began + TIMEOUT - time.monotonic()))
            missed += not result.ready()
    log.info("compiled ahead in %.0f s, %d ops left", time.monotonic() - began, missed)


def _set_up_compilers() -> None:
    """Set TRITON_CACHE_DIR, which torch.compile would change; worker processes inherit it.

    Also raise torch.compile's recompile limit: after eight sizes it would run functions eagerly.
    """
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "cache"))
    # These imports take three seconds.
    import torch._dynamo.config
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1
    torch._dynamo.config.recompile_limit = MAX_SIZES


def _run_sizes(name: str, device: str, dtype: torch.dtype, sizes: str) -> None:
    """Call the op's implementations and its compiled alternatives once at every size."""
    _set_up_compilers()
    op = next(op for op in all_ops() if op.name == name)
    with torch.inference_mode():
        for point in points_of(op, Draw(device, dtype, sizes)):
            _run(op, point, device)
            torch.cuda.empty_cache()
    torch.compiler.reset()


def _run(op: Op[..., Any], point: Point, device: str) -> None:
    given, kind = point.arguments, device.partition(":")[0]
    every = op.implementations.values()
    calls = [op.using(one.name) for one in every if runnable(one, [given], kind)]
    calls += [other.call for other in point.alternatives if other.name == COMPILED]
    for call in calls:
        try:
            call(*given.args, **given.kwargs)
        except Exception as error:  # noqa: BLE001 - raised again when it is measured
            log.debug("%s at %s: %s", op.name, point.size, error)
