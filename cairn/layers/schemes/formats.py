"""Formats of quantised checkpoints: names, shapes and values of the tensors that store one matrix
[out, in]. Schemes fill parameters from them.

Layouts of GPTQ, AWQ and compressed-tensors are those of `cairn.ops.weight_only.packing`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from cairn.errors import BadModel
from cairn.layers.weight import Weight
from cairn.ops.quantization import e8m0, nvfp4
from cairn.ops.weight_only import packing
from cairn.specs.quantization import StoredFormat

FLOATS = ("F32", "BF16", "F16")
WORD = packing.WORD


class Format(ABC):
    """How one matrix is stored."""

    def __init__(self, stored: StoredFormat) -> None:
        self.stored = stored

    @abstractmethod
    def tensors(self, name: str, rows: int, columns: int) -> list[Weight]:
        """The tensors that store a matrix, the codes first. `name`: their common prefix, such as
        "... .q_proj."."""

    @abstractmethod
    def values(self, *stored: Tensor) -> Tensor:
        """The matrix [rows, columns] float32, from its tensors."""

    def ignored(self, name: str) -> list[Weight]:
        """Tensors that a checkpoint may have beside them and that are not read."""
        return [Weight(f"{name}input_scale", (1,), None, required=False)]


class Integers(Format):
    """Codes in words, with scales [G, rows] and zero points of groups of columns."""

    @abstractmethod
    def codes(self, stored: Tensor) -> Tensor:
        """[rows, columns] int32, 0 .. 2^bits - 1."""

    @abstractmethod
    def scales(self, stored: Tensor) -> Tensor:
        """[G, rows] float32."""

    @abstractmethod
    def zeros(self, stored: Tensor) -> Tensor:
        """[G, rows] int16."""

    def groups(self, columns: int) -> int:
        """G."""
        return 1 if self.stored.group is None else -(-columns // self.stored.group)

    def values(self, *stored: Tensor) -> Tensor:
        """(code - zero) * scale."""
        codes, scales = self.codes(stored[0]), self.scales(stored[1])
        rest = list(stored[2:])
        zeros = self.zeros(rest.pop(0)).int() if self.stored.zeros else None
        by_column = rest.pop(0) if self.stored.ordered else None
        at = packing.group_of(codes.shape[1], scales.shape[0], by_column, codes.device)
        middle = 1 << self.stored.bits - 1 if zeros is None else zeros[at].t()
        return (codes - middle).float() * scales[at].t()

    def _words(self, numbers: int) -> int:
        return -(-numbers * self.stored.bits // WORD)


class Gptq(Integers):
    """qweight along the columns, scales, qzeros, and with act order g_idx."""

    def tensors(self, name: str, rows: int, columns: int) -> list[Weight]:
        """See the class."""
        groups = self.groups(columns)
        found = [
            _part(f"{name}qweight", (self._words(columns), rows), "I32"),
            _part(f"{name}scales", (groups, rows), *FLOATS),
            _part(f"{name}qzeros", (groups, self._words(rows)), "I32"),
        ]
        if self.stored.ordered:
            found.append(_part(f"{name}g_idx", (columns,), "I32", "I64"))
        return found

    def ignored(self, name: str) -> list[Weight]:
        """g_idx without act order."""
        found = super().ignored(name)
        if not self.stored.ordered:
            found.append(Weight(f"{name}g_idx", (1,), None, required=False))
        return found

    def codes(self, stored: Tensor) -> Tensor:
        """See the base."""
        return packing.unpack(stored, self.stored.bits, 0).t()

    def scales(self, stored: Tensor) -> Tensor:
        """See the base."""
        return stored.float()

    def zeros(self, stored: Tensor) -> Tensor:
        """See the base."""
        return (packing.unpack(stored, self.stored.bits, 1) + self.stored.less_one).short()


class Awq(Integers):
    """qweight and qzeros along the rows, 8 interleaved ones a word, and scales."""

    def tensors(self, name: str, rows: int, columns: int) -> list[Weight]:
        """See the class."""
        groups, words = self.groups(columns), self._words(rows)
        return [
            _part(f"{name}qweight", (columns, words), "I32"),
            _part(f"{name}scales", (groups, rows), *FLOATS),
            _part(f"{name}qzeros", (groups, words), "I32"),
        ]

    def codes(self, stored: Tensor) -> Tensor:
        """See the base."""
        return packing.unpack_awq(stored, self.stored.bits).t()

    def scales(self, stored: Tensor) -> Tensor:
        """See the base."""
        return stored.float()

    def zeros(self, stored: Tensor) -> Tensor:
        """See the base."""
        return packing.unpack_awq(stored, self.stored.bits).short()


class CompressedWords(Integers):
    """weight_packed along the columns, weight_scale [rows, G], and weight_zero_point along the
    rows (compressed-tensors' pack-quantized)."""

    def tensors(self, name: str, rows: int, columns: int) -> list[Weight]:
        """See the class."""
        groups = self.groups(columns)
        found = [
            _part(f"{name}weight_packed", (rows, self._words(columns)), "I32"),
            _part(f"{name}weight_scale", (rows, groups), *FLOATS),
        ]
        if self.stored.zeros:
            found.append(_part(f"{name}weight_zero_point", (self._words(rows), groups), "I32"))
        if self.stored.ordered:
            found.append(_part(f"{name}weight_g_idx", (columns,), "I32", "I64"))
        return found

    def ignored(self, name: str) -> list[Weight]:
        """The shape, which the config tells."""
        shape = Weight(f"{name}weight_shape", (2,), None, required=False)
        return [*super().ignored(name), shape]

    def codes(self, stored: Tensor) -> Tensor:
        """See the base."""
        return packing.unpack(stored, self.stored.bits, 1)

    def scales(self, stored: Tensor) -> Tensor:
        """See the base."""
        return stored.float().t()

    def zeros(self, stored: Tensor) -> Tensor:
        """See the base."""
        return packing.unpack(stored, self.stored.bits, 0).t().short()


class Codes(Format):
    """weight [rows, columns] of 8 bits, weight_scale [rows, G], or one for the matrix, and
    weight_zero_point."""

    def tensors(self, name: str, rows: int, columns: int) -> list[Weight]:
        """See the class."""
        group = self.stored.group
        kind = "I8" if self.stored.layout == "int8" else "F8_E4M3"
        shape = (1,) if group == 0 else (rows, 1 if group is None else -(-columns // group))
        found = [
            _part(f"{name}weight", (rows, columns), kind),
            _part(f"{name}weight_scale", shape, *FLOATS),
        ]
        if self.stored.zeros:
            found.append(_part(f"{name}weight_zero_point", shape, "I8"))
        return found

    def values(self, *stored: Tensor) -> Tensor:
        """(code - zero) * scale."""
        codes, scale, zero = stored[0].float(), stored[1], None
        if self.stored.zeros:
            zero = self.by_column(stored[2], *codes.shape)
        return (codes if zero is None else codes - zero) * self.by_column(scale, *codes.shape)

    def by_column(self, stored: Tensor, rows: int, columns: int) -> Tensor:
        """Scales or zero points for each number [rows, columns], or [rows, 1]."""
        group = self.stored.group
        if group == 0:
            return stored.float().reshape(1, 1).expand(rows, 1)
        if group is None:
            return stored.float().reshape(rows, 1)
        spread = stored.float().reshape(rows, -1).repeat_interleave(group, dim=1)
        return spread[:, :columns]


class Pairs(Format):
    """Pairs of e2m1 codes with scales of 16 numbers in e4m3 and one for all (NVFP4), or of 32 in
    e8m0 (MXFP4)."""

    def tensors(self, name: str, rows: int, columns: int) -> list[Weight]:
        """See the class."""
        if self.stored.layout == "mxfp4":
            return [
                _part(f"{name}weight_packed", (rows, columns // 2), "U8"),
                _part(f"{name}weight_scale", (rows, columns // 32), "U8", "F8_E8M0"),
            ]
        codes, factor = self._names
        return [
            _part(f"{name}{codes}", (rows, columns // 2), "U8"),
            _part(f"{name}weight_scale", (rows, columns // 16), "F8_E4M3"),
            _part(f"{name}{factor}", (1,), *FLOATS),
        ]

    @property
    def _names(self) -> tuple[str, str]:
        """Of the codes, and of the factor: ModelOpt's multiplies, the other divides."""
        if self.stored.layout == "nvfp4":
            return "weight_packed", "weight_global_scale"
        return "weight", "weight_scale_2"

    def ignored(self, name: str) -> list[Weight]:
        """Scales of activations, which stay as they are."""
        own = Weight(f"{name}input_global_scale", (1,), None, required=False)
        return [*super().ignored(name), own]

    def values(self, *stored: Tensor) -> Tensor:
        """code * scale."""
        numbers = nvfp4.unpacked(stored[0])
        if self.stored.layout == "mxfp4":
            return numbers * e8m0.decode(stored[1]).repeat_interleave(32, dim=1)
        factor = stored[2].float().reshape(())
        scale = stored[1].float() * (1 / factor if self.stored.layout == "nvfp4" else factor)
        return numbers * scale.repeat_interleave(nvfp4.BLOCK, dim=1)


FORMATS: dict[str, type[Format]] = {
    "gptq": Gptq,
    "awq": Awq,
    "packed": CompressedWords,
    **dict.fromkeys(("int8", "fp8"), Codes),
    **dict.fromkeys(("nvfp4", "modelopt_nvfp4", "mxfp4"), Pairs),
}


def format_of(stored: StoredFormat) -> Format:
    """The format that a spec describes."""
    return FORMATS[stored.layout](stored)


def checked(name: str, then: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A transform of scales, or of a matrix by scales, that refuses what is not finite.

    Raises:
        BadModel: naming the tensor.
    """

    def transform(*stored: Tensor) -> Tensor:
        found = then(*stored)
        if not bool(torch.isfinite(found).all()):
            raise BadModel(
                f"{name} and its scales give numbers that are NaN or infinite",
                "Copy the file again",
            )
        return found

    return transform


def _part(source: str, shape: tuple[int, ...], *dtypes: str) -> Weight:
    return Weight(source, shape, None, dtypes=dtypes, squeezed=True)
