"""How keys and values are stored in fewer bits: the bytes of one head in one slot, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvFormat:
    """The numbers of a head in one slot, and behind them their scales, a byte each.

    Attributes:
        name: as `--kv-cache-dtype` calls it.
        bits: of a number.
        block: numbers that share a scale; None: all of the head's.
    """

    name: str
    bits: int
    block: int | None = None

    def number_bytes(self, dim: int) -> int:
        """Bytes of `dim` numbers."""
        return dim * self.bits // 8

    def scale_bytes(self, dim: int) -> int:
        """Bytes of their scales. Where there are several, one byte of padding makes the bytes of a
        slot an even number: a format with one scale has an odd one, see `format_of`."""
        if self.block is None:
            return 1
        count = dim // self.block
        return count + (self.number_bytes(dim) + count) % 2

    def slot_bytes(self, dim: int) -> int:
        """Bytes of both."""
        return self.number_bytes(dim) + self.scale_bytes(dim)

    def holds(self, dim: int) -> bool:
        """Whether heads of `dim` numbers can be stored: in whole blocks."""
        return dim > 0 and dim % (self.block or 2) == 0


FP8_E4M3 = KvFormat("fp8_e4m3", bits=8)
FP4_E2M1 = KvFormat("fp4_e2m1", bits=4, block=16)
KV_FORMATS = {form.name: form for form in (FP8_E4M3, FP4_E2M1)}


def format_of(slot_bytes: int) -> tuple[KvFormat, int] | None:
    """The format and the numbers of a head that take so many bytes a slot; None: none does."""
    form, dim = (FP8_E4M3, slot_bytes - 1) if slot_bytes % 2 else (FP4_E2M1, slot_bytes // 9 * 16)
    return (form, dim) if form.holds(dim) and form.slot_bytes(dim) == slot_bytes else None
