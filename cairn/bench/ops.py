"""`cairn bench ops`: ops at the sizes they declare, against the roofline and alternatives."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cairn import ops as _every_op  # noqa: F401  (importing the package registers its ops)
from cairn.bench.roofline import Roofline, measure
from cairn.bench.timing import Timing, kernels, measure_calls, rotated
from cairn.errors import BadConfig, CairnError
from cairn.names import nearest
from cairn.ops.benching import Draw, Point
from cairn.ops.registry import REFERENCE, Op, all_ops
from cairn.ops.testing import Arguments

log = logging.getLogger(__name__)

MISTAKES = (RuntimeError, ValueError, TypeError)
"""What a call raises that cannot run, a compiler's errors included."""
SECONDS = {"full": 0.1, "tiny": 0.005}
"""Budget of one measurement, by sizes."""


@dataclass(frozen=True, slots=True)
class OpsPlan:
    """What to time.

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
        op, family: its name and folder.
        size: in words.
        dtype: of weights, activations and cache.
        implementation: what the op chose.
        ms: of one call.
        floor_ms: its bytes at the measured bandwidth or its operations at the measured GEMM rate,
            whichever takes longer.
        timed: "graph", "stream" or "clock", see `cairn.bench.timing.Timing`.
        bytes, flops: that count.
        launches: GPU kernels of one call; None on a CPU.
        others: name -> ms of the op's other implementations and of its alternatives.
        alternative, alternative_ms: the fastest of the alternatives from outside the op.
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
    launches: int | None = None
    others: dict[str, float] = field(default_factory=dict)
    alternative: str | None = None
    alternative_ms: float | None = None

    @property
    def gb_s(self) -> float:
        """10^9 bytes a second."""
        return self.bytes / self.ms / 1e6

    @property
    def gflop_s(self) -> float:
        """10^9 operations a second."""
        return self.flops / self.ms / 1e6

    @property
    def fraction(self) -> float:
        """Share of the floor that was reached, 1 at the floor."""
        return self.floor_ms / self.ms

    @property
    def speedup(self) -> float | None:
        """How much longer the alternative takes; None without one."""
        return None if self.alternative_ms is None else self.alternative_ms / self.ms

    def fields(self) -> dict[str, object]:
        """A flat JSON object."""
        derived = {name: getattr(self, name) for name in ("gb_s", "gflop_s", "fraction", "speedup")}
        return dataclasses.asdict(self) | derived


def run_ops(plan: OpsPlan) -> Iterator[tuple[OpTiming, Roofline]]:
    """Every op at every size as soon as it is timed, with the roofline of the run.

    Raises:
        BadConfig: a name that is neither an op nor a family, or a device that is not there.
        CairnError: at the end, if an op failed at a size.
    """
    chosen = chosen_ops(plan.names)
    if plan.device.startswith("cuda") and not torch.cuda.is_available():
        raise BadConfig(f"device {plan.device!r} is not there", "Give --device cpu")
    roofline = measure(plan.dtype, plan.device)
    draw = Draw(plan.device, getattr(torch, plan.dtype), plan.sizes)
    failed = []
    for op in chosen:
        assert op.bench_source is not None
        for point in op.bench_source(draw):
            try:
                yield _timing(op, point, plan, roofline), roofline
            except MISTAKES as error:
                log.error("%s at %s failed: %s", op.name, point.size, error)
                failed.append(f"{op.name} at {point.size}")
    if failed:
        raise CairnError(f"{len(failed)} sizes could not be timed: {'; '.join(failed)}")


def this_device() -> str:
    """ "cuda" where there is a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def chosen_ops(names: Sequence[str]) -> list[Op[..., Any]]:
    """The ops that these names mean, of those that declare sizes; no names mean all.

    Raises:
        BadConfig: an unknown name, or an op that declares no sizes.
    """
    every = all_ops()
    known = {name for op in every for name in (op.family, op.name, *op.names)}
    for name in names:
        if name not in known:
            close = nearest(name, known)
            raise BadConfig(f"{name!r} is no op and no family", f"Did you mean {close!r}?")
    wanted = set(names)
    chosen = [op for op in every if not wanted or wanted & {op.family, op.name, *op.names}]
    for op in chosen:
        if op.bench_source is None and wanted & {op.name, *op.names}:
            raise BadConfig(f"op {op.name} declares no sizes", "Add @bench to its file")
    without = [op.name for op in chosen if op.bench_source is None]
    if without:
        log.warning("not timed, for they declare no sizes: %s", ", ".join(without))
    return [op for op in chosen if op.name not in without]


def _timing(op: Op[..., Any], point: Point, plan: OpsPlan, roofline: Roofline) -> OpTiming:
    given = point.arguments
    chosen = op.choice(*given.args, **given.kwargs)
    budget = SECONDS[plan.sizes]

    def timed(function: Callable[..., Any], arguments: Arguments, touched: int) -> Timing:
        return measure_calls(rotated(function, arguments, touched), plan.device, budget)

    own = timed(op.using(chosen), given, point.bytes)
    implementations = {
        name: op.using(name)
        for name, one in op.implementations.items()
        if name != chosen
        and plan.device.partition(":")[0] in one.devices
        and one.accepts(given.args, given.kwargs)
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
            others[name] = timed(function, arguments, point.bytes).seconds * 1e3
        except MISTAKES as error:
            log.warning("%s at %s: %s cannot run: %s", op.name, point.size, name, error)
    best = min((name for name in outside if name in others), key=others.__getitem__, default=None)
    floor = max(point.bytes / roofline.bandwidth, point.flops / roofline.gemm)
    return OpTiming(
        op=op.name,
        family=op.family,
        size=point.size,
        dtype=plan.dtype,
        implementation=chosen,
        ms=own.seconds * 1e3,
        floor_ms=floor * 1e3,
        timed=own.how,
        bytes=point.bytes,
        flops=point.flops,
        launches=kernels_of(op, point) if plan.device.startswith("cuda") else None,
        others=others,
        alternative=best,
        alternative_ms=None if best is None else others[best],
    )


def kernels_of(op: Op[..., Any], point: Point) -> int:
    """GPU kernels that one call launches."""
    given = point.arguments
    with torch.inference_mode():
        return kernels(lambda: op(*given.args, **given.kwargs))
