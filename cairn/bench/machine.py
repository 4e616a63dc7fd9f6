"""Description of this machine: processor, memory, devices and versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

PACKAGES = ("cairn-llm", "torch", "triton", "transformers", "safetensors", "numpy", "numba")
BF16_FLAGS = ("amx_tile", "amx_bf16", "avx512_bf16", "avx512f", "avx2")


@dataclass(frozen=True, slots=True)
class CpuInfo:
    """The processor.

    Attributes:
        model: name from the operating system.
        cores: logical processors available to this process.
        flags: its instruction sets, of those in BF16_FLAGS.
    """

    model: str
    cores: int
    flags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Main memory in bytes; `available` can be allocated without swapping."""

    total: int
    available: int


@dataclass(frozen=True, slots=True)
class MachineInfo:
    """Facts about the machine in `cairn doctor` and in benchmark records.

    Attributes:
        system: operating system and architecture.
        python: version.
        packages: name -> installed version; None: not installed.
        threads: intra-op threads of torch.
        devices: all torch devices, "cpu" first.
    """

    system: str
    python: str
    packages: dict[str, str | None]
    cpu: CpuInfo
    memory: MemoryInfo
    threads: int
    devices: tuple[str, ...]


def describe_machine() -> MachineInfo:
    """Describe this machine, without measurements."""
    return MachineInfo(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        packages={name: _version(name) for name in PACKAGES},
        cpu=describe_cpu(),
        memory=describe_memory(),
        threads=torch.get_num_threads(),
        devices=("cpu", *_cuda_devices()),
    )


def describe_cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> CpuInfo:
    """The processor, from /proc/cpuinfo if it exists."""
    fields = _colon_fields(cpuinfo)
    has = set(fields.get("flags", fields.get("Features", "")).split())
    model = fields.get("model name") or platform.processor() or platform.machine()
    return CpuInfo(model, _usable_cores(), tuple(flag for flag in BF16_FLAGS if flag in has))


def describe_memory(meminfo: Path = Path("/proc/meminfo")) -> MemoryInfo:
    """Main memory, from /proc/meminfo if it exists; otherwise all memory counts as available."""
    fields = _colon_fields(meminfo)
    if "MemTotal" in fields:
        total, free = (_kib(fields[name]) for name in ("MemTotal", "MemAvailable"))
        return MemoryInfo(total, free)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return MemoryInfo(total, total)


def commit() -> str | None:
    """Short hash of the source tree's commit, with a "+" if files were changed.

    Outside git: the environment variable CAIRN_COMMIT, or None.
    """
    here = Path(__file__).parent
    given = os.environ.get("CAIRN_COMMIT") or None
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty=+"],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return given
    return found.stdout.strip() or given


def _colon_fields(path: Path) -> dict[str, str]:
    """Values of `name : value` lines; the first one of a repeated name."""
    fields: dict[str, str] = {}
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return fields
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            fields.setdefault(name.strip(), value.strip())
    return fields


def _kib(text: str) -> int:
    return int(text.split()[0]) * 1024


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cuda_devices() -> list[str]:
    if not torch.cuda.is_available():
        return []
    names = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        gib = properties.total_memory / (1 << 30)
        names.append(f"cuda:{index} {properties.name}, {gib:.0f} GiB")
    return names
