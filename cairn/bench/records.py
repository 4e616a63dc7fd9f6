"""One record per measured cell, kept as a JSON list per run."""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
from dataclasses import dataclass
from pathlib import Path

from cairn.bench.machine import MachineInfo
from cairn.errors import BadConfig

RESULTS = Path("benchmarks/results")


@dataclass(frozen=True, slots=True)
class Cell:
    """One measured point.

    Attributes:
        shape: shape or model folder.
        phase: "prefill", "decode" or "offline".
        context: user tokens of each sequence before the phase's end.
        batch: sequences at once.
        backend: "hsa", "dense" or "transformers".
        dtype: of weights and cache.
        ms: milliseconds of the whole prefill, of one decode step, or of the offline run.
        floor_ms: what the roofline measured in the same run allows; None where it says nothing.
        tokens_per_s: user tokens of all sequences per second.
        pages_read: pages a query read per landmark layer, mean; None for other layers or phases.
        host_ms: milliseconds per step outside the model; None where not known.
        parameters: of the model that ran, so that nobody compares models of different size.
    """

    shape: str
    phase: str
    context: int
    batch: int
    backend: str
    dtype: str
    ms: float
    floor_ms: float | None
    tokens_per_s: float
    pages_read: float | None = None
    host_ms: float | None = None
    parameters: int | None = None

    @property
    def fraction(self) -> float | None:
        """Share of the floor that was reached, 1 at the floor."""
        return None if self.floor_ms is None else self.floor_ms / self.ms


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What all cells of a run share.

    Attributes:
        machine: where it ran.
        commit: of the source tree, None outside git.
        command: the command line.
        bandwidth: bytes per second, None when not measured.
        gemm: operations per second, None when not measured.
    """

    machine: MachineInfo
    commit: str | None
    command: str
    bandwidth: float | None = None
    gemm: float | None = None


def records(cells: list[Cell], run: RunInfo) -> list[dict[str, object]]:
    """One flat JSON object per cell."""
    shared = shared_fields(run)
    return [dataclasses.asdict(cell) | {"fraction": cell.fraction} | shared for cell in cells]


def shared_fields(run: RunInfo) -> dict[str, object]:
    """What every record of a run says about where, with what and when."""
    return {
        "torch": run.machine.packages.get("torch"),
        "commit": run.commit,
        "cpu": run.machine.cpu.model,
        "devices": list(run.machine.devices),
        "threads": run.machine.threads,
        "bandwidth_gb_s": _rounded(run.bandwidth, 1e9),
        "gemm_gflop_s": _rounded(run.gemm, 1e9),
        "command": run.command,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def append(found: list[dict[str, object]], path: Path) -> None:
    """Append to the JSON list in `path`, created with its folder when absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([*_known(path), *found], indent=1) + "\n", encoding="utf-8")


def check_appendable(path: Path) -> None:
    """Raise BadConfig when `append` could not append to this file: before an hour's run."""
    try:
        known = _known(path)
    except (OSError, ValueError) as error:
        raise BadConfig(f"{path} cannot be appended to: {error}") from error
    if not isinstance(known, list):
        raise BadConfig(f"{path} is no JSON list of records", "Give another --output")


def _known(path: Path) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
    return found


def default_path(name: str, machine: MachineInfo, folder: Path = RESULTS) -> Path:
    """`<date>-<machine>-<name>.json` below `folder`."""
    device = machine.devices[1] if len(machine.devices) > 1 else machine.cpu.model
    words = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")[:40].strip("-")
    return folder / f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}-{words}-{name}.json"


def _rounded(value: float | None, unit: float) -> float | None:
    return None if value is None else round(value / unit, 2)
