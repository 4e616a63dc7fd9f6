"""One record per measured cell, kept as a JSON list per run."""

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
    """One measured point.

    Attributes:
        shape: shape or model folder.
        phase: "prefill", "decode" or "offline".
        context: user tokens of each sequence before the phase's end.
        batch: sequences at once.
        backend: "hsa", "dense" or "transformers".
        dtype: of weights and activations.
        ms: milliseconds of the whole prefill, of one decode step, or of the offline run.
        floor_ms: what the roofline measured in the same run allows; None where it says nothing.
        tokens_per_s: user tokens of all sequences per second.
        pages_read: pages a query read per landmark layer, mean; None for other layers or phases.
        host_us: microseconds of the host in a step that only decodes, mean: all but the wait for
            the device; None where no such step ran.
        host_us_by_stage: what they went into, see `cairn.engine.totals.HostTimes`.
        parameters: of the model that ran, so that nobody compares models of different size.
        selection: of landmark layers: "random" (weights and prompts), "shared" (random weights,
            neighbours select much the same pages), "trained"; None for other layers.
        union16: pages that 16 neighbouring queries select together in a layer, mean; None where
            not measured.
        launches: GPU kernels of one step; None on a CPU.
        peak_bytes: GPU memory that the phase took at most beside weights and pages; None on a CPU.
        step_tokens: slots that a step may run.
        kv_cache_dtype: of keys and values.
        frame_hits: of pages in host memory: share of the selected ones that were in frames.
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
        """Share of the floor that was reached, 1 at the floor."""
        return None if self.floor_ms is None else self.floor_ms / self.ms


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What all records of a run share.

    Attributes:
        machine: where it ran.
        commit: of the source tree, None outside git.
        command: the command line.
    """

    machine: MachineInfo
    commit: str | None
    command: str


def fields_of(cell: Cell) -> dict[str, object]:
    """A cell as a flat JSON object."""
    return dataclasses.asdict(cell) | {"fraction": cell.fraction}


def shared_fields(run: RunInfo, roofline: Roofline | None = None) -> dict[str, object]:
    """What every record of a run says about where, with what and when."""
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
        name: of the measurement, for the file's default name.
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
        """Append a record: these fields and what the run's records share."""
        record = {**fields, **shared_fields(self._run, roofline)}
        append([record], self.path)
        self.count += 1
        return record


def append(found: list[dict[str, object]], path: Path) -> None:
    """Append to the JSON list in `path`, created with its folder when absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([*known(path), *found], indent=1) + "\n", encoding="utf-8")


def check_appendable(path: Path) -> None:
    """Raise BadConfig before a run if `append` could not write to this file."""
    try:
        found = known(path)
    except (OSError, ValueError) as error:
        raise BadConfig(f"{path} cannot be appended to: {error}") from error
    if not isinstance(found, list):
        raise BadConfig(f"{path} is not a JSON list of records", "Give another --output")


def known(path: Path) -> list[dict[str, object]]:
    """The records that a file holds; none where there is no file."""
    found: list[dict[str, object]] = []
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
    return found


def default_path(name: str, machine: MachineInfo, folder: Path = RESULTS) -> Path:
    """`<date>-<machine>-<name>.json` below `folder`, the machine being its GPU if it has one."""
    device = machine.cpu.model
    if len(machine.devices) > 1:
        # "cuda:0 NVIDIA H100 80GB HBM3, 79 GiB" is an h100.
        device = machine.devices[1].partition(" ")[2].partition(",")[0]
        device = re.sub(r"(?i)\b(nvidia|amd|\d+gb|hbm\w*)\b", "", device)
    words = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")[:40].strip("-")
    return folder / f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}-{words}-{name}.json"
