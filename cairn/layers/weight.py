"""Declarations of which tensors of a checkpoint fill which parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import EllipsisType
from typing import Literal

from torch import Tensor

Index = EllipsisType | slice | int | tuple[EllipsisType | slice | int, ...]
WHOLE: Index = ...
Draw = Literal["matrix", "unit", "around_one", "around_zero", "one", "experts"]
"""How random weights are drawn: "matrix" keeps the variance of its input, "unit" has variance 1,
"around_one" and "around_zero" are 1 and 0 plus normal numbers of deviation 0.1, "one" is 1,
"experts" are integers below `Weight.choices`, distinct within every row."""


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A tensor of a checkpoint, and the part of a parameter that it fills.

    Attributes:
        source: its name in the checkpoint.
        shape: its shape there.
        parameter: the parameter that it fills; None: the tensor is known and ignored.
        at: the part of the parameter.
        read: the part of the tensor that is read.
        transform: applied to what was read, on the parameter's device, and to the tensors
            `beside` it; None: it is copied, and converted to the parameter's dtype.
        pieces: sizes of the parts, along the axis that ranks divide, each of which they divide by
            itself, or numbers in the same proportion; empty: the axis is one part.
        whole: ranks read all of it and of those beside it, and divide what the transform gives.
        held: numbers along the first axis that the rank reads, of a tensor for all experts; None:
            ranks divide it by the shapes of their parts.
        required: a checkpoint without it is incomplete.
        draw: how it is drawn where no checkpoint is read.
        dtypes: dtypes that the stored tensor may have, as file headers write them; None: any
            floating-point type that converts without a scale.
        beside: further tensors of the checkpoint that the transform needs, whole; they fill
            nothing themselves.
        squeezed: axes of size 1 are ignored: [N, 1] may be stored as [N], [1] as a number.
        choices: of what is drawn as "experts".
    """

    source: str
    shape: tuple[int, ...]
    parameter: Tensor | None
    at: Index = WHOLE
    read: Index = WHOLE
    transform: Callable[..., Tensor] | None = None
    pieces: tuple[int, ...] = ()
    whole: bool = False
    held: tuple[int, ...] | None = None
    required: bool = True
    draw: Draw = "matrix"
    dtypes: tuple[str, ...] | None = None
    beside: tuple[Weight, ...] = ()
    squeezed: bool = False

    def has_shape(self, stored: tuple[int, ...]) -> bool:
        """Whether a stored tensor of this shape is what is declared."""
        if stored == self.shape or not self.squeezed:
            return stored == self.shape
        return [n for n in stored if n != 1] == [n for n in self.shape if n != 1]

    choices: int = 0

    @property
    def place(self) -> Tensor:
        """The part of the parameter, as a view."""
        assert self.parameter is not None
        return self.parameter.detach()[self.at]


@dataclass(frozen=True, slots=True)
class Source:
    """Names of a module's tensors in a checkpoint.

    Attributes:
        prefix: of their names.
        stored: names of all tensors of the checkpoint; None: nothing is read, and a module that
            knows several formats declares the first.
    """

    prefix: str = ""
    stored: frozenset[str] | None = None

    def name(self, suffix: str) -> str:
        """The name of one tensor."""
        return self.prefix + suffix

    def within(self, child: str) -> Source:
        """The source of a part of the module."""
        return Source(f"{self.prefix}{child}.", self.stored)

    def holds(self, suffix: str) -> bool:
        """Whether the checkpoint has this tensor."""
        return self.stored is not None and self.prefix + suffix in self.stored
