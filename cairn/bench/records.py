"""Benchmark records: one per measured cell, in a JSON list per run."""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cairn.bench.machine import MachineInfo, commit, describe_machine
from cairn.bench.roofline import Roofline
from cairn.errors import BadConfig

RESULTS = Path("benchmarks/results")


@dataclass(frozen=True, slots=True)
class Cell:
    """One measured cell.

    Attributes:
        shape: shape or model folder.
        phase: "prefill", "decode" or "offline".
        context: user tokens per sequence at the end of the phase.
        batch: number of sequences.
        backend: "hsa", "dense" or "transformers".
        dtype: of weights and activations.
        ms: milliseconds of the whole prefill, of one decode step, or of the offline run.
        floor_ms: least time by the roofline measured in the same run; None: unknown.
        tokens_per_s: user tokens of all sequences per second.
        pages_read: mean number of pages per query and landmark layer; None for other layers or
            phases.
        host_us: mean host time of a decode-only step in microseconds, without the wait for the
            device; None without such steps.
        host_us_by_stage: the same by stage, see `cairn.engine.totals.HostTimes`.
        parameters: number of parameters of the model.
        selection: of landmark layers: "random" (weights and prompts), "shared" (random weights;
            adjacent queries select mostly the same pages), "trained"; None for other layers.
        union16: mean number of distinct pages that 16 adjacent queries select in a layer; None: not
            measured.
        launches: GPU kernels of one step; None on a CPU.
        peak_bytes: peak GPU memory of the phase beyond weights and pages; None on a CPU.
        step_tokens: most slots of a step.
        kv_cache_dtype: of keys and values.
        frame_hits: with pages in host memory: fraction of selected pages found in frames.
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
    host_us: float | None = None
    host_us_by_stage: dict[str, float] | None = None
    parameters: int | None = None
    selection: str | None = None
    union16: float | None = None
    launches: int | None = None
    peak_bytes: int | None = None
    step_tokens: int | None = None
    kv_cache_dtype: str | None = None
    frame_hits: float | None = None

    @property
    def fraction(self) -> float | None:
        """floor_ms / ms: 1 at the roofline."""
        return None if self.floor_ms is None else self.floor_ms / self.ms


@dataclass(frozen=True, slots=True)
class RunInfo:
    """Facts that all records of a run share.

    Attributes:
        machine: the machine.
        commit: of the source tree; None outside git.
        command: the command line.
    """

    machine: MachineInfo
    commit: str | None
    command: str


def fields_of(cell: Cell) -> dict[str, object]:
    """A cell as a flat JSON object."""
    return dataclasses.asdict(cell) | {"fraction": cell.fraction}


def shared_fields(run: RunInfo, roofline: Roofline | None = None) -> dict[str, object]:
    """Fields that all records of a run share: machine, versions, rates and date."""
    return {
        "torch": run.machine.packages.get("torch"),
        "triton": run.machine.packages.get("triton"),
        "commit": run.commit,
        "cpu": run.machine.cpu.model,
        "devices": list(run.machine.devices),
        "threads": run.machine.threads,
        "bandwidth_gb_s": None if roofline is None else round(roofline.bandwidth / 1e9, 2),
        "gemm_gflop_s": None if roofline is None else round(roofline.gemm / 1e9, 2),
        "command": run.command,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


class RecordFile:
    """Appends the records of a run one by one, so that a later failure loses none.

    Args:
        name: name of the measurement, for the default file name.
        command: the command line.
        output: the file; None: the default.

    Attributes:
        path: of the file.
        count: records added.

    Raises:
        BadConfig: the file exists and is no list of records.
    """

    def __init__(self, name: str, command: str, output: Path | None = None) -> None:
        self._run = RunInfo(describe_machine(), commit(), command)
        self.path = output or default_path(name, self._run.machine)
        self.count = 0
        check_appendable(self.path)

    def add(
        self, fields: Mapping[str, object], roofline: Roofline | None = None
    ) -> dict[str, object]:
        """Append a record of these fields and the shared ones, and return it."""
        record = {**fields, **shared_fields(self._run, roofline)}
        append([record], self.path)
        self.count += 1
        return record


def append(found: list[dict[str, object]], path: Path) -> None:
    """Append to the JSON list in `path`; creates the file and its folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([*known(path), *found], indent=1) + "\n", encoding="utf-8")


def check_appendable(path: Path) -> None:
    """Raise BadConfig unless `append` can write to this file; to be called before a run."""
    try:
        found = known(path)
    except (OSError, ValueError) as error:
        raise BadConfig(f"{path} cannot be appended to: {error}") from error
    if not isinstance(found, list):
        raise BadConfig(f"{path} is not a JSON list of records", "Give another --output")


def known(path: Path) -> list[dict[str, object]]:
    """The records of a file; an empty list if it does not exist."""
    found: list[dict[str, object]] = []
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
    return found


def default_path(name: str, machine: MachineInfo, folder: Path = RESULTS) -> Path:
    """Path `<date>-<machine>-<name>.json` in `folder`; the machine is named by its GPU if it has
    one."""
    device = machine.cpu.model
    if len(machine.devices) > 1:
        # "cuda:0 NVIDIA H100 80GB HBM3, 79 GiB" is an h100.
        device = machine.devices[1].partition(" ")[2].partition(",")[0]
        device = re.sub(r"(?i)\b(nvidia|amd|\d+gb|hbm\w*)\b", "", device)
    words = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")[:40].strip("-")
    return folder / f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}-{words}-{name}.json"
