"""One rank's share of a model: its spec, and its part of every stored tensor.

A rank's module is built from the spec of its share, with the same declarations as the whole model.
Where the two declare different sizes of an axis, the rank reads its part of it; tensors of equal
declared shapes are replicated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cairn.distributed.groups import ALONE, Group
from cairn.errors import BadConfig, BadModel
from cairn.layers.linear import ExpertLinear, Linear
from cairn.layers.weight import Index, Weight
from cairn.specs.model import LayerSpec, ModelSpec

MAX_RANKS = 64
"""Largest number of ranks that an error message suggests."""


def local(spec: ModelSpec, ranks: int) -> ModelSpec:
    """The spec of one of several ranks, which all have the same.

    Raises:
        BadConfig: the model cannot be divided so; it names the numbers of ranks that can be.
    """
    if ranks == 1:
        return spec
    try:
        return _divided(spec, ranks)
    except BadConfig as error:
        fitting = [n for n in range(1, MAX_RANKS + 1) if _divides(spec, n)]
        raise BadConfig(
            f"tensor_parallel_size is {ranks}, but {error}",
            f"Use one of {', '.join(map(str, fitting))}",
        ) from None


def _divided(spec: ModelSpec, ranks: int) -> ModelSpec:
    draft = spec.draft
    if draft is not None:
        draft = replace(draft, layer=_layer(draft.layer, ranks))
    return replace(spec, layers=tuple(_layer(layer, ranks) for layer in spec.layers), draft=draft)


def _divides(spec: ModelSpec, ranks: int) -> bool:
    try:
        _divided(spec, ranks)
    except BadConfig:
        return False
    return True


def _layer(layer: LayerSpec, ranks: int) -> LayerSpec:
    return replace(layer, mixer=layer.mixer.of_rank(ranks), ffn=layer.ffn.of_rank(ranks))


class Share(NamedTuple):
    """The parts of a tensor that a rank reads.

    Attributes:
        axis: the divided axis.
        parts: slices of it, which are concatenated; empty: the rank reads all of the tensor.
    """

    axis: int = 0
    parts: tuple[slice, ...] = ()

    @classmethod
    def of(
        cls, whole: Sequence[int], own: Sequence[int], pieces: Sequence[int], group: Group
    ) -> Share:
        """From the shape of a tensor and that of the rank's part.

        Args:
            pieces: see `Weight`.

        Raises:
            ValueError: the tensor cannot be divided so.
        """
        differing = [axis for axis, (a, b) in enumerate(zip(whole, own, strict=True)) if a != b]
        if not differing:
            return cls()
        [axis] = differing
        size, ratio = whole[axis], whole[axis] // own[axis]
        total = sum(pieces) or 1
        bounds = [size * n // total for n in accumulate(pieces or (1,), initial=0)]
        # Several ranks have the same part where there are fewer parts than ranks.
        number = group.rank * ratio // group.size
        parts = []
        for begin, end in pairwise(bounds):
            count = (end - begin) // ratio
            parts.append(slice(begin + number * count, begin + (number + 1) * count))
        if group.size % ratio or sum(part.stop - part.start for part in parts) != own[axis]:
            raise ValueError(f"{list(whole)} cannot be divided into {list(own)}")
        return cls(axis, tuple(parts))

    @classmethod
    def of_experts(cls, held: Sequence[int]) -> Share:
        """These indices along the first axis, in this order."""
        begins = [i for i, expert in enumerate(held) if i == 0 or expert != held[i - 1] + 1]
        bounds = pairwise([*begins, len(held)])
        return cls(0, tuple(slice(held[a], held[b - 1] + 1) for a, b in bounds))

    def read(self, stored: Any, otherwise: Index) -> Tensor:
        """The parts of a tensor, or of a slice of a file; `otherwise`: what is read of a tensor
        that is not divided."""
        if not self.parts:
            whole: Tensor = stored[otherwise]
            return whole
        before = (slice(None),) * self.axis
        found = [stored[(*before, part)] for part in self.parts]
        return found[0] if len(found) == 1 else torch.cat(found, self.axis)


class SharedWeight(NamedTuple):
    """The declarations of one tensor by a rank's module and by the whole model's.

    Attributes:
        own: of the rank.
        whole: of the model; its parameters need no memory.
        group: the ranks.
    """

    own: Weight
    whole: Weight
    group: Group

    def fill(self, stored: Any, *beside: Tensor) -> None:
        """Write the part of a parameter that a stored tensor fills.

        Args:
            stored: the tensor, or a slice of a file that is read when it is indexed.
            beside: the tensors that its transform needs beside it.
        """
        own, whole = self.own, self.whole
        if own.whole and whole.transform is not None:
            made = whole.transform(stored[own.read], *beside)
            own.place.copy_(self.placed.read(made, ...))
            return
        read = self._share(own, whole).read(stored, own.read)
        if own.transform is not None:
            parts = [
                self._share(*pair).read(other, ...)
                for *pair, other in zip(own.beside, whole.beside, beside, strict=True)
            ]
            read = own.transform(read, *parts)
        own.place.copy_(read)

    @property
    def placed(self) -> Share:
        """Parts of what the whole model has in the place of the parameter."""
        if isinstance(self.own.read, slice) and self.own.read != self.whole.read:
            return Share(0, (self.own.read,))
        if self.own.held is not None:
            return Share.of_experts(self.own.held)
        shapes = self.whole.place.shape, self.own.place.shape
        return Share.of(*shapes, self.own.pieces, self.group)

    def _share(self, own: Weight, whole: Weight) -> Share:
        if own.held is not None:
            return Share.of_experts(own.held)
        try:
            return Share.of(whole.shape, own.shape, self.whole.pieces, self.group)
        except ValueError as error:
            raise BadModel(
                f"{whole.source} cannot be divided between {self.group.size} ranks: {error}",
                "Use fewer ranks (--tensor-parallel-size)",
            ) from None


class Division:
    """How a model is divided between ranks.

    Args:
        whole: a module of the whole model, which may be without memory.
        group: the ranks.
    """

    def __init__(self, whole: Any, group: Group = ALONE) -> None:
        self._whole, self._group = whole, group

    def shared(self, own: Sequence[Weight], stored: frozenset[str] | None) -> list[SharedWeight]:
        """Declarations of a rank's module beside those of the whole model, tensor by tensor."""
        whole = own if self._group.alone else self._whole.weights(stored)
        pairs = zip(own, whole, strict=True)
        return [SharedWeight(mine, every, self._group) for mine, every in pairs]


def divide(own: nn.Module, whole: nn.Module) -> None:
    """Make the matrices of the whole model and of a rank, none of which is filled yet, such that
    one can be divided into the other. Raises BadConfig if one cannot."""
    for mine, every in zip(own.modules(), whole.modules(), strict=True):
        if isinstance(mine, Linear | ExpertLinear) and isinstance(every, type(mine)):
            every.scheme.divide(mine, every)
