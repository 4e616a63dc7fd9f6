"""What `cairn ops` prints: the ops, their implementations, and the choice for each device type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cairn.errors import BadConfig
from cairn.ops.registry import Op, all_ops


@dataclass(frozen=True)
class ImplementationRow:
    """An implementation as `cairn ops` prints it; `conditional`: dtype or shape may refuse it;
    `missing`: why it cannot run on this machine."""

    name: str
    devices: tuple[str, ...]
    conditional: bool
    missing: str


@dataclass(frozen=True)
class OpRow:
    """A line of `cairn ops`. `names`: of the public functions; `chosen`: device type -> names of
    implementations in the order they are tried in."""

    family: str
    op: str
    names: tuple[str, ...]
    implementations: tuple[ImplementationRow, ...]
    chosen: dict[str, tuple[str, ...]]


def table(devices: Sequence[str] = ("cpu", "cuda")) -> list[OpRow]:
    """Ops, their implementations and the choice for each device type, CAIRN_OPS included.

    A forced implementation that cannot run on a device leaves its tuple empty there.
    """

    def names(entry: Op[..., Any], device: str) -> tuple[str, ...]:
        try:
            return tuple(i.name for i in entry.candidates(device))
        except BadConfig:
            return ()

    return [
        OpRow(
            entry.family,
            entry.name,
            entry.names,
            tuple(
                ImplementationRow(i.name, i.devices, i.conditional, i.missing)
                for i in entry.implementations.values()
            ),
            {device: names(entry, device) for device in devices},
        )
        for entry in all_ops()
    ]
