"""The pages of docs/ops: one a family, out of docstrings, the registry and the ops' cases."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cairn.ops.implementation import REFERENCE, Implementation
from cairn.ops.registry import Op, all_ops
from cairn.ops.testing import cases_of

INDEX = "README.md"
SECTION = re.compile(r"^(Args|Returns|Raises|Attributes|Yields):$")
ITEM = re.compile(r"^    (?! )([^:]+): (.*)$")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MADE = "These pages are made by `cairn ops --docs docs/ops`."
"""Stands in the index: a folder with it holds these pages and nothing else."""
INTRODUCTION = f"""# Ops

Every function is imported from `cairn.ops` (`sequence_attention`, which training adds, from
`cairn.train.sequence`) and runs on CUDA and CPU tensors, under `torch.compile`
and in CUDA graphs. It has a definition in PyTorch, named `reference`, and implementations that are
tested against it; a call takes the first one that accepts its arguments. `cairn ops` shows the
choice, and `CAIRN_OPS=NAME=IMPLEMENTATION` forces another.

{MADE}
Tables of speed are made from records of `cairn bench ops` in `benchmarks/results`, by `--measured
FILE`. Times are of replays of a CUDA graph. Shares are of the roofline (measured bandwidth or GEMM
rate), of the bandwidth of a large copy, and of a copy of as many bytes. Then follow the fastest
alternative outside the op, and the time the host takes for an eager call, with the least of the
alternatives. Launches of an eager call are recorded once and replayed for the same shapes (the
launch cache); the first calls take the host several times as long.
"""


@dataclass(frozen=True)
class Entry:
    """A public name of `cairn.ops`.

    Attributes:
        name, family: as exported, and the folder it is defined in.
        value: the op, function or class.
        op: the op that runs; None: a plain function or a class.
    """

    name: str
    family: str
    value: Any
    op: Op[..., Any] | None

    @property
    def summary(self) -> str:
        """The first sentence of its docstring."""
        text = (inspect.getdoc(self.value) or "").partition("\n\n")[0]
        return " ".join(text.split())


def entries() -> list[Entry]:
    """What `cairn.ops` exports, and the ops of other packages of cairn, by family, then name."""
    of_name = {name: op for op in all_ops() for name in op.names}
    names = {name: "cairn.ops" for name in importlib.import_module("cairn.ops").__all__}
    for name, op in of_name.items():
        if op.__module__.startswith("cairn."):
            names.setdefault(name, op.__module__.rpartition(".")[0])
    found = []
    for name, package in names.items():
        value = getattr(importlib.import_module(package), name)
        family = value.__module__.split(".")[2]
        found.append(Entry(name, family, value, of_name.get(name)))
    return sorted(found, key=lambda entry: (entry.family, entry.name.lower()))


def pages(measured: Sequence[Mapping[str, Any]] = ()) -> dict[str, str]:
    """File name -> text of every page, the index among them.

    Args:
        measured: records of `cairn bench ops`; of an op's size the last one is shown.
    """
    every = entries()
    speed: dict[str, dict[str, Mapping[str, Any]]] = {}
    for record in measured:
        if "error" in record:
            continue
        speed.setdefault(record["op"], {})[record["size"]] = record
    families = list(dict.fromkeys(entry.family for entry in every))
    texts = {INDEX: _index(every, families)}
    for family in families:
        own = [entry for entry in every if entry.family == family]
        texts[f"{family}.md"] = _page(family, own, speed)
    return texts


def _index(every: list[Entry], families: list[str]) -> str:
    lines = [INTRODUCTION]
    for family in families:
        own = [entry for entry in every if entry.family == family]
        lines += [f"## [{family}]({family}.md)", "", _about(own[0]), ""]
        lines += ["| function | what it does | implementations |", "|---|---|---|"]
        for entry in own:
            names = [] if entry.op is None else [*entry.op.implementations, REFERENCE]
            cells = (f"[`{entry.name}`]({family}.md#{entry.name.lower()})", _text(entry.summary))
            lines.append(f"| {' | '.join(cells)} | {', '.join(names)} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _about(entry: Entry) -> str:
    package = ".".join(entry.value.__module__.split(".")[:3])
    return _text(inspect.getdoc(importlib.import_module(package)) or "")


def _page(
    family: str, own: list[Entry], speed: Mapping[str, Mapping[str, Mapping[str, Any]]]
) -> str:
    lines = [f"# {family}", "", _about(own[0]), ""]
    for entry in own:
        lines += [f"## {entry.name}", "", "```python", _signature(entry), "```", ""]
        lines += _docstring(inspect.getdoc(entry.value) or "")
        if entry.op is not None:
            lines += _implementations(entry, entry.op)
            lines += _measured(list(speed.get(entry.op.name, {}).values()))
    return "\n".join(lines).rstrip() + "\n"


def _signature(entry: Entry) -> str:
    """One parameter a line where they do not fit into one."""
    signature = inspect.signature(entry.value)
    name = entry.name
    whole = f"{name}{signature}".replace("'", "").replace("torch.Tensor", "Tensor")
    if len(whole) <= 100:
        return whole
    lines, keyword_only = [], False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            lines.append("    *,")
        lines.append(f"    {parameter},".replace("'", "").replace("torch.Tensor", "Tensor"))
    result = whole.rpartition(") -> ")[2] if ") -> " in whole else ""
    return "\n".join([f"{name}(", *lines, f") -> {result}" if result else ")"])


def _docstring(text: str) -> Iterator[str]:
    """Google's sections as lists, what stands before them as it is."""
    in_section = False
    for block in _joined(text.splitlines()):
        header, item = SECTION.match(block), ITEM.match(block)
        if header is not None:
            if in_section:
                yield ""
            in_section = True
            yield from (f"**{header[1]}**", "")
        elif in_section and item is not None:
            names = ", ".join(f"`{name.strip()}`" for name in item[1].split(","))
            yield f"- {names}: {_text(item[2])}"
        elif in_section:
            yield _text(block.strip())
        else:
            yield _text(block)
    yield ""


def _joined(lines: list[str]) -> Iterator[str]:
    """Lines of a section's item as one."""
    held: str | None = None
    for line in lines:
        if held is not None and line.startswith("        "):
            held = f"{held} {line.strip()}"
            continue
        if held is not None:
            yield held
        held = line
    if held is not None:
        yield held


def _implementations(entry: Entry, op: Op[..., Any]) -> Iterator[str]:
    if op.mutates:
        yield f"Changes {', '.join(f'`{name}`' for name in op.mutates)}."
        yield ""
    if entry.name != op.name:
        yield f"Runs `torch.ops.cairn.{op.name}`."
        yield ""
    yield "| implementation | devices | tested dtypes | takes |"
    yield "|---|---|---|---|"
    for name in (*op.implementations, REFERENCE):
        implementation = op._named(name)
        takes = "some layouts" if implementation.when is not None else "all"
        dtypes = ", ".join(_short(dtype) for dtype in tested(op, implementation)) or "-"
        yield f"| {name} | {', '.join(implementation.devices)} | {dtypes} | {takes} |"
    yield ""


def _measured(records: list[Mapping[str, Any]]) -> Iterator[str]:
    """The best of other implementations from outside stands beside the time."""
    if not records:
        return
    last = records[-1]
    # Not all sizes need be of one run.
    commits = list(dict.fromkeys(record["commit"] for record in records))
    at = f"at commit{'s' * (len(commits) > 1)} {' and '.join(commits)}"
    where = f"{_text(last['devices'][-1])}, {last['dtype']}, {at}"
    yield f"Measured on {where}:"
    yield ""
    shares = "of roofline | of copy bandwidth | of an equal copy"
    yield f"| size | implementation | µs | GB/s | {shares} | alternative | host, µs |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for record in records:
        other = "-"
        if record["alternative"] is not None:
            other = f"{record['alternative']} {record['alternative_ms'] * 1e3:.1f} µs"
        cells = (
            *(_text(record["size"]), record["implementation"], f"{record['ms'] * 1e3:.1f}"),
            *(f"{record['gb_s']:.0f}", f"{record['fraction']:.0%}", f"{record['of_copy']:.0%}"),
            *(_alike_of(record), other, _host_of(record)),
        )
        yield f"| {' | '.join(cells)} |"
    yield ""


def _alike_of(record: Mapping[str, Any]) -> str:
    """The share of what a copy of as many bytes reaches; older records have none."""
    return f"{record['of_alike']:.0%}" if record.get("of_alike") is not None else "-"


def _host_of(record: Mapping[str, Any]) -> str:
    """What the host takes for a call outside of a graph, and for the least of those beside it."""
    if record.get("host_ms") is None:
        return "-"
    own = f"{record['host_ms'] * 1e3:.0f}"
    if record["least_host_ms"] is None:
        return own
    return f"{own}, {record['least_host']} {record['least_host_ms'] * 1e3:.0f}"


def tested(op: Op[..., Any], implementation: Implementation) -> list[torch.dtype]:
    """Dtypes of the first floating-point argument in the cases that an implementation takes."""
    if op.case_source is None:
        return []
    found = {_first_dtype([*case.args, *case.kwargs.values()]) for case in cases_of(op)}
    if implementation.dtypes is not None:
        found &= set(implementation.dtypes)
    known = [dtype for dtype in DTYPES if dtype in found]
    others = {dtype for dtype in found if dtype is not None}.difference(known)
    return known + sorted(others, key=str)


def _first_dtype(values: list[Any]) -> torch.dtype | None:
    tensors = [value for value in values if isinstance(value, Tensor)]
    return next((t.dtype for t in tensors if t.is_floating_point()), None)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _text(text: str) -> str:
    """Plain text as Markdown: no emphasis, no tables, no tags, but for what stands in backticks."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"[*|<]", r"\\\g<0>", part) for part in parts[::2]]
    return "`".join(parts)
