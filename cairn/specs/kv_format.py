"""Formats of quantised keys and values: the bytes of one head in one slot."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvFormat:
    """The codes of a head in one slot, followed by their scales, a byte each.

    Attributes:
        name: as `--kv-cache-dtype` calls it.
        bits: of a code.
        dtype: of the cache's tensors, by torch's name; it identifies the format.
        block: elements that share a scale; None: all of the head's.
    """

    name: str
    bits: int
    dtype: str
    block: int | None = None

    def code_bytes(self, dim: int) -> int:
        """Bytes of `dim` codes."""
        return dim * self.bits // 8

    def scale_bytes(self, dim: int) -> int:
        """Bytes of their scales."""
        return 1 if self.block is None else dim // self.block

    def slot_bytes(self, dim: int) -> int:
        """Bytes of both."""
        return self.code_bytes(dim) + self.scale_bytes(dim)

    def head_dim(self, slot_bytes: int) -> int | None:
        """Elements of a head that take this many bytes; None: no head size does."""
        if self.block is None:
            dim = (slot_bytes - 1) * 8 // self.bits
        else:
            dim = slot_bytes // self.slot_bytes(self.block) * self.block
        return dim if self.holds(dim) and self.slot_bytes(dim) == slot_bytes else None

    def holds(self, dim: int) -> bool:
        """Whether heads of `dim` numbers can be stored: in whole blocks."""
        return dim > 0 and dim % (self.block or 2) == 0


FP8_E4M3 = KvFormat("fp8_e4m3", bits=8, dtype="uint8")
FP4_E2M1 = KvFormat("fp4_e2m1", bits=4, dtype="int8", block=16)
KV_FORMATS = {form.name: form for form in (FP8_E4M3, FP4_E2M1)}
