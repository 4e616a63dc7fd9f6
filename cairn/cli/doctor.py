"""`cairn doctor`: the machine, the versions and the engine's automatic choices."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cairn.cli.options import json_option, model_argument, model_or_default

if TYPE_CHECKING:
    from cairn.bench.machine import MachineInfo

GIB = 1 << 30


@click.command()
@model_argument
@json_option
def doctor(model: Path | None, as_json: bool) -> None:
    """Show the machine and the automatic choices for MODEL.

    Also shows the versions of libraries, and the reason of each choice.
    """
    from cairn.bench.machine import describe_machine
    from cairn.config import EngineOptions, resolve
    from cairn.engine.build import native_bf16, this_machine
    from cairn.models.registry import load_spec

    folder = model_or_default(model)
    config = resolve(EngineOptions(), load_spec(folder), this_machine())
    machine = describe_machine()
    if as_json:
        report: dict[str, Any] = dataclasses.asdict(machine)
        report["native_bf16"] = native_bf16()
        report["model"] = folder.name
        report["choices"] = [dataclasses.asdict(choice) for choice in config.choices]
        click.echo(json.dumps(report, default=str))
        return
    for name, value in _machine_lines(machine):
        click.echo(f"{name:<14}{value}")
    bf16 = "in hardware" if native_bf16() else "emulated: float32 is faster"
    click.echo(f"{'bfloat16':<14}{bf16}")
    click.echo(f"\nFor {folder.name} the engine would choose")
    for choice in config.choices:
        click.echo(f"  {choice}")


def _machine_lines(machine: MachineInfo) -> list[tuple[str, str]]:
    memory = machine.memory
    lines = [
        ("system", machine.system),
        ("processor", machine.cpu.model),
        ("cores", f"{machine.cpu.cores}, of which torch uses {machine.threads}"),
        ("instructions", ", ".join(machine.cpu.flags) or "none of those that matter here"),
        ("memory", f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB available"),
        ("devices", "; ".join(machine.devices)),
        ("python", machine.python),
    ]
    return lines + [(name, found or "not installed") for name, found in machine.packages.items()]
