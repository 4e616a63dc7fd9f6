"""Filling a model's parameters: streamed from safetensors, or drawn from a seed.

The modules declare which tensor fills which parameter (`cairn.layers.weight`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from cairn.errors import BadModel
from cairn.layers.embedding import Table
from cairn.layers.weight import Weight
from cairn.models.checkpoint import CONVERTIBLE, TensorEntry, is_gguf, read_headers
from cairn.models.gguf_file import GgufFile
from cairn.models.sharding import Division, SharedWeight

log = logging.getLogger(__name__)

SHOWN = 5
"""Most tensors that an error lists of each kind; others are counted."""


class DeclaringModel(Protocol):
    """A module that declares the tensors of its parameters."""

    def weights(self, stored: frozenset[str] | None = None) -> list[Weight]:
        """Every tensor of a checkpoint that holds `stored`; None: of one that is written."""


def load_weights(
    model: Any, folder: Path, ignored: Sequence[str] = (), division: Division | None = None
) -> None:
    """Fill every parameter of `model` from the folder's safetensors files.

    Tensors go one at a time from the mapped file to the parameters' device and are converted there,
    so that device holds the model and one tensor, and on a GPU the host holds neither.

    Args:
        model: an nn.Module that is a `DeclaringModel`.
        folder: of the checkpoint.
        ignored: regular expressions of tensors that may be stored and are not read.
        division: of the model between ranks; None: `model` is all of it.

    Raises:
        BadModel: a file is truncated or corrupt, tensors are missing, unexpected or misshapen (all
            of them are named in one error, before any parameter is written), or a value is not
            possible.
    """
    entries = read_headers(folder)
    stored = frozenset(entries)
    weights = model.weights(stored)
    division = division or Division(model)
    pairs = division.shared(weights, stored)
    account([pair.whole for pair in pairs], entries, folder, ignored)
    _check_filled(model, weights)
    _clear(model)
    by_file: dict[Path, list[SharedWeight]] = defaultdict(list)
    for pair in pairs:
        if pair.own.parameter is not None and pair.own.source in entries:
            by_file[entries[pair.own.source].file].append(pair)
    device = str(next(model.parameters()).device)
    for path, some in by_file.items():
        with _opened(path, device) as file:
            for pair in some:
                beside = [_whole(entries, other.source, device) for other in pair.own.beside]
                pair.fill(file.get_slice(pair.own.source), *beside)


@contextlib.contextmanager
def _opened(path: Path, device: str) -> Iterator[Any]:
    """Open a safetensors or GGUF file. Raises BadModel if it is corrupt."""
    if is_gguf(path):
        yield GgufFile(path).opened(device)
        return
    try:
        with safe_open(path, framework="pt", device=device) as file:
            yield file
    except SafetensorError as error:
        raise BadModel(f"{path} is corrupt: {error}", "Copy the file again") from None


def _whole(entries: Mapping[str, TensorEntry], name: str, device: str) -> Tensor:
    """One tensor by its name."""
    with _opened(entries[name].file, device) as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor


def account(
    weights: Sequence[Weight],
    entries: Mapping[str, TensorEntry],
    folder: Path,
    ignored: Sequence[str] = (),
) -> None:
    """Compare what the model declares with what the files hold, in both directions.

    Raises:
        BadModel: naming up to five tensors of each kind of difference.
    """
    declared = {w.source: w for weight in weights for w in (weight, *weight.beside)}
    needed = {w.source for weight in weights for w in weight.beside}
    skipped = re.compile("|".join(f"(?:{pattern})" for pattern in ignored) or r"(?!)")
    missing = [n for n, w in declared.items() if w.required and n not in entries]
    others = [n for n in entries if n not in declared and not skipped.search(n)]
    unexpected = [n for n in others if not _is_old_buffer(n, entries[n])]
    if len(others) > len(unexpected):
        log.info("%d buffers of older exports are not read", len(others) - len(unexpected))
    filling = needed | {n for n, w in declared.items() if w.parameter is not None}
    used = [n for n in declared if n in filling and n in entries]
    misshapen = [n for n in used if not declared[n].has_shape(entries[n].shape)]
    unreadable = [
        n for n in used if entries[n].dtype not in (declared[n].dtypes or tuple(CONVERTIBLE))
    ]
    problems = [
        _listed("missing", [f"{n} {list(declared[n].shape)}" for n in missing]),
        _listed("unexpected", [f"{n} {list(entries[n].shape)}" for n in unexpected]),
        _listed(
            "misshapen",
            [f"{n} is {list(entries[n].shape)}, not {list(declared[n].shape)}" for n in misshapen],
        ),
        _listed("of unsupported dtype", [f"{n} {entries[n].dtype}" for n in unreadable]),
    ]
    told = "; ".join(problem for problem in problems if problem)
    if told:
        raise BadModel(
            f"the weights in {folder} do not fit config.json: {told}",
            "Use config.json and weights of the same checkpoint",
        )


def _is_old_buffer(name: str, entry: TensorEntry) -> bool:
    """Whether a stored tensor is a table or a mask that older exports kept beside the weights, and
    that follows from the config."""
    if re.search(
        r"(?:^|\.)(?:rotary(?:_pos)?_emb|rope)\.(?:original_)?(?:inv_freq|freqs|cos_cached|sin_cached)$"
        r"|(?:^|\.)position_ids$",
        name,
    ):
        return True
    if not re.search(r"(?:^|\.)(?:attn|self_attn|attention)\.(?:masked_)?bias$", name):
        return False
    square = (
        len(entry.shape) == 4 and entry.shape[:2] == (1, 1) and entry.shape[2] == entry.shape[3]
    )
    single = math.prod(entry.shape) <= 1
    return square or single or entry.dtype in ("BOOL", "U8")


def draw_weights(model: Any, seed: int, division: Division | None = None) -> None:
    """Fill every parameter with random values of a sensible scale.

    The same seed gives the same values on the same kind of device, in every dtype (rounded), and
    however the model is divided, if its rows are stored in their order. Matrices keep the variance
    of their input, norms lie around 1.
    """
    weights = model.weights()
    _check_filled(model, weights)
    _clear(model)
    division = division or Division(model)
    for i, pair in enumerate(division.shared(weights, None)):
        weight = pair.own
        if weight.parameter is None:
            continue
        place = weight.place
        if weight.draw == "one":
            place.fill_(1.0)
            continue
        if weight.draw == "experts":
            lines, count = weight.shape
            turned = torch.arange(lines, device=place.device).unsqueeze(1)
            place.copy_((turned + torch.arange(count, device=place.device)) % weight.choices)
            continue
        generator = torch.Generator(place.device).manual_seed((seed << 20) + i)
        shape = pair.whole.place.shape
        noise = torch.randn(shape, dtype=torch.float32, device=place.device, generator=generator)
        noise = pair.placed.read(noise, ...)
        if weight.draw == "matrix":
            noise.mul_(pair.whole.shape[-1] ** -0.5)
        elif weight.draw != "unit":
            noise.mul_(0.1).add_(1.0 if weight.draw == "around_one" else 0.0)
        place.copy_(noise)


def parameter_bytes(model: Any) -> tuple[int, int]:
    """Parameters of a model and the bytes that they take, also of one without memory; padding of
    stored matrices is counted, a tied head once."""
    weights = [weight for weight in model.weights() if weight.parameter is not None]
    count = sum(torch.Size(weight.shape).numel() for weight in weights)
    return count, sum(parameter.nbytes for parameter in model.parameters())


def _padding(model: nn.Module) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Rows that no stored tensor fills, and the parameters they are of."""
    for module in model.modules():
        if isinstance(module, Table) and module.padding:
            yield module.weight, module.weight.detach()[-module.padding :]


def _clear(model: nn.Module) -> None:
    """Zero padding, and scales: of those 255 is NaN, and any other byte a power of two."""
    for _, rows in _padding(model):
        rows.zero_()
    for module in model.modules():
        scale = getattr(module, "scale", None)
        if isinstance(scale, nn.Parameter):
            scale.zero_()


def _check_filled(model: nn.Module, weights: Sequence[Weight]) -> None:
    """Check that every element of every parameter is filled exactly once."""
    filled: dict[int, int] = defaultdict(int)
    for parameter, padding in _padding(model):
        filled[id(parameter)] += padding.numel()
    for weight in weights:
        if weight.parameter is not None:
            filled[id(weight.parameter)] += weight.place.numel()
    for name, parameter in model.named_parameters():
        count = filled[id(parameter)]
        if count != parameter.numel():
            raise AssertionError(f"{count} of the {parameter.numel()} numbers of {name} are filled")


def _listed(kind: str, items: list[str]) -> str:
    if not items:
        return ""
    more = f", ... ({len(items)} in all)" if len(items) > SHOWN else ""
    return f"{kind}: {', '.join(items[:SHOWN])}{more}"
