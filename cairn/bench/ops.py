"""`cairn bench ops`: times of ops at their benchmark points, beside the roofline and
alternatives."""

from __future__ import annotations

import dataclasses
import functools
import logging
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cairn.bench import registered as _registered  # noqa: F401  (ops are found once imported)
from cairn.bench.ahead import compile_ahead
from cairn.bench.roofline import Roofline, measure, measure_copy
from cairn.bench.timing import Timing, host_seconds, kernels, measure_calls, rotated
from cairn.errors import BadConfig, CairnError
from cairn.names import suggestion
from cairn.ops.bench_points import Draw, Point, points_of
from cairn.ops.implementation import REFERENCE
from cairn.ops.registry import Op, all_ops
from cairn.ops.testing import Arguments, runnable

log = logging.getLogger(__name__)

SECONDS = {"full": 0.05, "tiny": 0.005}
"""Seconds of one measurement, by `sizes`."""
MAX_HOSTED = 1e-3
"""Host time is measured only for calls shorter than this many seconds."""
TURNS = 3
"""Number of times that an op and its best alternative are measured in turns: GPU clocks drift by
more than the two often differ."""


@dataclass(frozen=True, slots=True)
class OpsPlan:
    """Options of `cairn bench ops`.

    Attributes:
        names: ops or families; empty: all.
        dtype: of weights, activations and cache: "float32", "bfloat16" or "float16".
        device: a torch device.
        sizes: "full" or "tiny".
    """

    names: tuple[str, ...]
    dtype: str
    device: str
    sizes: str


@dataclass(frozen=True, slots=True)
class OpTiming:
    """An op at one size.

    Attributes:
        op, family: name and family of the op.
        size: description.
        dtype: of weights, activations and cache.
        implementation: the chosen one.
        ms: of one call.
        floor_ms: time of its bytes at the measured bandwidth, or of its operations at the measured
            GEMM rate if that is longer.
        timed: "graph", "stream" or "clock", see `cairn.bench.timing.Timing`.
        bytes, flops: of the point.
        copy_gb_s: bandwidth of a large copy in this run, read and written, in GB/s.
        alike_ms: of a copy that reads and writes as many bytes, timed like the op; None for
            compute-bound points.
        launches: GPU kernels of one call; None on a CPU, and after an implementation's first size.
        host_ms: host time of an eager call; None on a CPU, for calls that synchronize, and for
            calls of MAX_HOSTED seconds or more.
        others: name -> ms of the op's other implementations and of its alternatives.
        alternative, alternative_ms: the fastest alternative from outside the op, measured in turns
            with it.
        least_host, least_host_ms: the alternative with the least host time.
    """

    op: str
    family: str
    size: str
    dtype: str
    implementation: str
    ms: float
    floor_ms: float
    timed: str
    bytes: int
    flops: float
    copy_gb_s: float
    alike_ms: float | None = None
    launches: int | None = None
    host_ms: float | None = None
    others: dict[str, float] = field(default_factory=dict)
    alternative: str | None = None
    alternative_ms: float | None = None
    least_host: str | None = None
    least_host_ms: float | None = None

    @property
    def gb_s(self) -> float:
        """Bandwidth in GB/s."""
        return self.bytes / self.ms / 1e6

    @property
    def gflop_s(self) -> float:
        """Rate in GFLOP/s."""
        return self.flops / self.ms / 1e6

    @property
    def fraction(self) -> float:
        """floor_ms / ms: 1 at the roofline."""
        return self.floor_ms / self.ms

    @property
    def of_copy(self) -> float:
        """Bandwidth relative to that of a large copy."""
        return self.gb_s / self.copy_gb_s

    @property
    def of_alike(self) -> float | None:
        """Bandwidth relative to that of a copy of as many bytes, launch included."""
        return None if self.alike_ms is None else self.alike_ms / self.ms

    @property
    def speedup(self) -> float | None:
        """alternative_ms / ms; None without an alternative."""
        return None if self.alternative_ms is None else self.alternative_ms / self.ms

    def fields(self) -> dict[str, object]:
        """A flat JSON object."""
        names = ("gb_s", "gflop_s", "fraction", "of_copy", "of_alike", "speedup")
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class OpFailure:
    """An op that could not be timed.

    Attributes:
        op, family, dtype: as in OpTiming.
        size: description; None: building the arguments of the next size failed.
        error: message of the exception.
    """

    op: str
    family: str
    size: str | None
    dtype: str
    error: str

    def fields(self) -> dict[str, object]:
        """A flat JSON object."""
        return dataclasses.asdict(self)


def run_ops(plan: OpsPlan) -> Iterator[tuple[OpTiming | OpFailure, Roofline]]:
    """Yield the timing of every op and size when it is measured, with the roofline of the run.

    On a GPU all kernels are first compiled into the disk caches, on all cores.

    Raises:
        BadConfig: a name that is neither an op nor a family, or a device that does not exist.
        CairnError: at the end, if an op failed at a size.
    """
    chosen = chosen_ops(plan.names)
    if plan.device.startswith("cuda") and not torch.cuda.is_available():
        raise BadConfig(f"device {plan.device!r} is not there", "Give --device cpu")
    options = (plan.device, getattr(torch, plan.dtype), plan.sizes)
    if plan.device.startswith("cuda"):
        compile_ahead(chosen, Draw(*options))
    roofline, copy = measure(plan.dtype, plan.device), measure_copy(plan.device) / 1e9
    failed = 0
    for op in chosen:
        # Reseed for each op, so that its arguments do not depend on which ops are timed.
        for row in _rows(op, Draw(*options), plan, roofline, copy):
            failed += isinstance(row, OpFailure)
            yield row, roofline
    if failed:
        raise CairnError(f"{failed} sizes could not be timed", "Their records say why")


def _rows(
    op: Op[..., Any], draw: Draw, plan: OpsPlan, roofline: Roofline, copy: float
) -> Iterator[OpTiming | OpFailure]:
    """Timings or failures of an op at its sizes."""
    points = points_of(op, draw)
    size: str | None = None
    counted: set[str] = set()
    while True:
        try:
            point = next(points, None)
            if point is None:
                return
            size = point.size
            row = _timing(op, point, plan, roofline, copy)
            if plan.device.startswith("cuda") and row.implementation not in counted:
                counted.add(row.implementation)
                row = dataclasses.replace(row, launches=kernels_of(op, point))
            yield row
        except Exception as error:  # noqa: BLE001 - recorded as a failure
            log.error("%s at %s failed: %s", op.name, size, error)
            yield OpFailure(op.name, op.family, size, plan.dtype, str(error))
            if size is None:
                return
        size = None


def this_device() -> str:
    """ "cuda" if there is a GPU, otherwise "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def chosen_ops(names: Sequence[str]) -> list[Op[..., Any]]:
    """The ops with benchmark points among these ops and families; no names: all.

    Raises:
        BadConfig: an unknown name, or an op without benchmark points.
    """
    every = all_ops()
    known = {name for op in every for name in (op.family, op.name, *op.names)}
    for name in names:
        if name not in known:
            raise BadConfig(f"{name!r} is neither an op nor a family", suggestion(name, known))
    wanted = set(names)
    chosen = [op for op in every if not wanted or wanted & {op.family, op.name, *op.names}]
    for op in chosen:
        if op.bench_source is None and wanted & {op.name, *op.names}:
            raise BadConfig(f"op {op.name} declares no sizes", "Add @bench to its file")
    without = [op.name for op in chosen if op.bench_source is None]
    if without:
        log.warning("not timed, for they declare no sizes: %s", ", ".join(without))
    return [op for op in chosen if op.name not in without]


def _timing(
    op: Op[..., Any], point: Point, plan: OpsPlan, roofline: Roofline, copy: float
) -> OpTiming:
    given = point.arguments
    chosen = op.choice(*given.args, **given.kwargs)
    budget = SECONDS[plan.sizes]

    def timed(function: Callable[..., Any], arguments: Arguments) -> Timing:
        return measure_calls(rotated(function, arguments, point.bytes), plan.device, budget)

    # The first measurement at a size is up to 10% slower and is dropped.
    own = [timed(op.using(chosen), given)]
    implementations = {
        name: op.using(name)
        for name, one in op.implementations.items()
        if name != chosen and runnable(one, [given], plan.device.partition(":")[0])
    }
    outside = {one.name: (one.call, one.arguments or given) for one in point.alternatives}
    if chosen == REFERENCE:
        outside.pop("definition", None)
    others: dict[str, float] = {}
    for name, (function, arguments) in (
        *((name, (function, given)) for name, function in implementations.items()),
        *outside.items(),
    ):
        try:
            others[name] = timed(function, arguments).seconds * 1e3
        except Exception as error:  # noqa: BLE001 - the op is recorded without it
            log.warning("%s at %s: %s cannot run: %s", op.name, point.size, name, error)
    best = min((name for name in outside if name in others), key=others.__getitem__, default=None)
    against = []
    for _ in range(TURNS):
        own.append(timed(op.using(chosen), given))
        if best is not None:
            against.append(timed(*outside[best]).seconds * 1e3)
    if best is not None:
        others[best] = statistics.median(against)
    seconds = statistics.median(one.seconds for one in own[1:])
    host_ms, hosts = None, {}
    if plan.device.startswith("cuda") and seconds < MAX_HOSTED:
        host_ms = _host_ms(op, given)
        beside = {name: _host_ms(*outside[name]) for name in outside if name in others}
        hosts = {name: took for name, took in beside.items() if took is not None}
    least_host = min(hosts, key=hosts.__getitem__, default=None)
    moving, reckoning = point.bytes / roofline.bandwidth, point.flops / roofline.gemm
    alike_ms = None
    if moving >= reckoning:
        alike_ms = timed(Tensor.copy_, _copied(point.bytes, plan)).seconds * 1e3
    return OpTiming(
        op=op.name,
        family=op.family,
        size=point.size,
        dtype=plan.dtype,
        implementation=chosen,
        ms=seconds * 1e3,
        floor_ms=max(moving, reckoning) * 1e3,
        timed=own[0].how,
        bytes=point.bytes,
        flops=point.flops,
        copy_gb_s=copy,
        alike_ms=alike_ms,
        host_ms=host_ms,
        others=others,
        alternative=best,
        alternative_ms=None if best is None else others[best],
        least_host=least_host,
        least_host_ms=None if least_host is None else hosts[least_host],
    )


def _copied(size: int, plan: OpsPlan) -> Arguments:
    """Arguments of a copy that reads and writes `size` bytes in total (rounded to even)."""
    source = torch.zeros(max(1, size // 2), dtype=torch.uint8, device=plan.device)
    return Arguments((torch.empty_like(source), source))


def _host_ms(function: Callable[..., Any], given: Arguments) -> float | None:
    """Host time of a call on a GPU; None if it synchronizes."""
    seconds = host_seconds(functools.partial(function, *given.args, **given.kwargs))
    return None if seconds is None else seconds * 1e3


def kernels_of(op: Op[..., Any], point: Point) -> int:
    """Number of GPU kernels that one call launches."""
    given = point.arguments
    with torch.inference_mode():
        return kernels(lambda: op(*given.args, **given.kwargs))
