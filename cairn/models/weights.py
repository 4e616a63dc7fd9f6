"""Filling a model's parameters: streamed from safetensors, or drawn from a seed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from cairn.errors import BadModel
from cairn.layers.embedding import Table
from cairn.models.checkpoint import DTYPES, TensorEntry, read_headers
from cairn.models.weight_map import StoredTensor, WeightMap

SHOWN = 5
"""Tensors named per kind of mistake; the rest is counted."""


def load_weights(model: nn.Module, tensors: WeightMap, folder: Path) -> None:
    """Fill every parameter of `model` from the folder's safetensors files.

    Tensors go one at a time from the mapped file to the parameters' device and are converted there,
    so that device holds the model and one tensor, and on a GPU the host holds neither.

    Raises:
        BadModel: a file is truncated or corrupt, or tensors are missing, unexpected or misshapen;
            all of them are named in one error, before any parameter is written.
    """
    entries = read_headers(folder)
    account(tensors, entries, folder)
    _check_filled(model, tensors)
    _clear_padding(model)
    by_file: dict[Path, list[str]] = defaultdict(list)
    for name, stored in tensors.items():
        if stored.target is not None and name in entries:
            by_file[entries[name].file].append(name)
    device = str(next(model.parameters()).device)
    for path, names in by_file.items():
        try:
            with safe_open(path, framework="pt", device=device) as file:
                for name in names:
                    place = destination(model, tensors[name])
                    place.copy_(_first_rows(file.get_slice(name), place))
        except SafetensorError as error:
            raise BadModel(f"{path} is corrupt: {error}", "Copy the file again") from None


def account(tensors: WeightMap, entries: dict[str, TensorEntry], folder: Path) -> None:
    """Compare what the model needs with what the files hold, in both directions.

    Raises:
        BadModel: naming up to five tensors of each kind of difference.
    """
    missing = [n for n, stored in tensors.items() if stored.required and n not in entries]
    unexpected = [n for n in entries if n not in tensors]
    used = [n for n, stored in tensors.items() if stored.target is not None and n in entries]
    misshapen = [n for n in used if entries[n].shape != tensors[n].shape]
    unreadable = [n for n in used if entries[n].dtype not in DTYPES]
    problems = [
        _listed("missing", [f"{n} {list(tensors[n].shape)}" for n in missing]),
        _listed("unexpected", [f"{n} {list(entries[n].shape)}" for n in unexpected]),
        _listed(
            "misshapen",
            [f"{n} is {list(entries[n].shape)}, not {list(tensors[n].shape)}" for n in misshapen],
        ),
        _listed("of unsupported dtype", [f"{n} {entries[n].dtype}" for n in unreadable]),
    ]
    told = "; ".join(problem for problem in problems if problem)
    if told:
        raise BadModel(
            f"the weights in {folder} do not fit config.json: {told}",
            "Use config.json and weights of the same checkpoint",
        )


def draw_weights(model: nn.Module, tensors: WeightMap, seed: int) -> None:
    """Fill every parameter with random numbers of a sensible scale.

    The same seed gives the same numbers on the same kind of device, in every dtype (rounded).
    Matrices keep the variance of their input, norms lie around 1.
    """
    _check_filled(model, tensors)
    _clear_padding(model)
    for i, (name, stored) in enumerate(tensors.items()):
        if stored.target is None:
            continue
        place = destination(model, stored)
        generator = torch.Generator(place.device).manual_seed((seed << 20) + i)
        noise = torch.randn(
            place.shape, dtype=torch.float32, device=place.device, generator=generator
        )
        if "norm" in name:
            noise.mul_(0.1).add_(1.0)
        elif not name.endswith(".q_c"):
            noise.mul_(stored.shape[-1] ** -0.5)
        place.copy_(noise)


def destination(model: nn.Module, stored: StoredTensor) -> Tensor:
    """The rows of the parameter that a stored tensor fills."""
    assert stored.target is not None
    rows = stored.shape[0] if stored.rows is None else stored.rows
    return model.get_parameter(stored.target).detach()[stored.start : stored.start + rows]


def _first_rows(tensor: Any, place: Tensor) -> Tensor:
    """As much of a stored tensor as `place` holds; a vector may fill one row of a matrix."""
    if len(tensor.get_shape()) < place.dim():
        row: Tensor = tensor[:]
        return row.unsqueeze(0)
    rows: Tensor = tensor[: place.shape[0]]
    return rows


def _padding(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Rows that no stored tensor fills, by the names of their parameters."""
    for name, module in model.named_modules():
        if isinstance(module, Table) and module.padding:
            yield f"{name}.weight", module.weight.detach()[-module.padding :]


def _clear_padding(model: nn.Module) -> None:
    for _, rows in _padding(model):
        rows.zero_()


def _check_filled(model: nn.Module, tensors: WeightMap) -> None:
    """Every parameter is filled completely, and no place twice."""
    filled: dict[str, int] = defaultdict(int)
    for name, padding in _padding(model):
        filled[name] += padding.numel()
    for stored in tensors.values():
        if stored.target is not None:
            filled[stored.target] += destination(model, stored).numel()
    for name, parameter in model.named_parameters():
        if filled.get(name) != parameter.numel():
            raise AssertionError(
                f"weight map fills {filled.get(name)} of {name}, {parameter.shape}"
            )


def _listed(kind: str, items: list[str]) -> str:
    if not items:
        return ""
    more = f", ... ({len(items)} in all)" if len(items) > SHOWN else ""
    return f"{kind}: {', '.join(items[:SHOWN])}{more}"
