"""Numbers with units, for terminals."""

from __future__ import annotations

UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def readable(count: float) -> str:
    """Format a number of bytes: 1536 -> "1.5 KiB"."""
    unit = 0
    while count >= 1024 and unit < len(UNITS) - 1:
        count /= 1024
        unit += 1
    return f"{count:,.0f} {UNITS[unit]}" if unit == 0 else f"{count:,.1f} {UNITS[unit]}"
