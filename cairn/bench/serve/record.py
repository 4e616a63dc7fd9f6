"""The record of a measurement of a server, in the form of the other benchmarks' records."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from cairn.bench.machine import commit, describe_machine
from cairn.bench.records import RunInfo, append, check_appendable, default_path, shared_fields

SECRET = "--api-key"


class Recorder:
    """Describes the machine before a measurement and appends its record afterwards.

    Args:
        phase: "serve", "stall" or "soak".
        arguments: of the command line; the API key in them is not recorded.
        output: file of records; None: the default for the model.

    Raises:
        BadConfig: `output` exists and is no list of records.
    """

    def __init__(self, phase: str, arguments: Sequence[str], output: Path | None) -> None:
        if output is not None:
            check_appendable(output)
        self._phase = phase
        self._output = output
        self._run = RunInfo(describe_machine(), commit(), command_line(arguments))

    def save(self, model: str, fields: Mapping[str, object]) -> tuple[dict[str, object], Path]:
        """Append the record of a model's server; the record and its file.

        Its machine is the one that generated the load.
        """
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", model.rstrip("/").rsplit("/", 1)[-1])
        path = self._output or default_path(f"{self._phase}-{name}", self._run.machine)
        record = {"shape": name, "phase": self._phase, **fields, **shared_fields(self._run)}
        append([record], path)
        return record, path


def command_line(arguments: Sequence[str]) -> str:
    """The command line of `cairn`, without the value of the API key."""
    shown = list(arguments)
    for i, word in enumerate(arguments):
        if word == SECRET and i + 1 < len(shown):
            shown[i + 1] = "..."
        elif word.startswith(f"{SECRET}="):
            shown[i] = f"{SECRET}=..."
    return shlex.join(["cairn", *shown])
