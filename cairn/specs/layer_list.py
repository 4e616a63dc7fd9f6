"""Numbers of layers as text: 0-3,7."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from cairn.errors import BadConfig


def parse_layers(
    layers: str | Sequence[int], num_layers: int, option: str = "hsa_layers"
) -> tuple[int, ...]:
    """Layer numbers from "0-3,7" or a sequence, ascending and without repeats.

    Raises:
        BadConfig: not of that form, or a number outside 0 .. num_layers - 1.
    """
    found: set[int] = set()
    if isinstance(layers, str):
        for part in layers.split(","):
            match = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)
            if match is None:
                raise BadConfig(f"{option} has {part!r}", "Write numbers and ranges: 0-3,7")
            first, last = int(match[1]), int(match[2] or match[1])
            if last < first:
                raise BadConfig(f"{option} has the empty range {part!r}", "Write first-last")
            # One layer beyond the last is enough for the error below; the range is not expanded
            # further.
            found.update((first, *range(first, min(last, num_layers) + 1)))
    else:
        numbers = tuple(layers) if isinstance(layers, Iterable) else (layers,)
        if not all(type(n) is int for n in numbers):
            raise BadConfig(f"{option} is {layers!r}", "Write numbers and ranges: 0-3,7")
        found.update(numbers)
    outside = sorted(n for n in found if not 0 <= n < num_layers)
    if outside:
        raise BadConfig(
            f"{option} names layer {outside[0]}, but the model has {num_layers}",
            f"Layers are 0 to {num_layers - 1}",
        )
    return tuple(sorted(found))


def format_layers(layers: Sequence[int]) -> str:
    """Layer numbers as ranges: (0, 1, 2, 7) -> "0-2,7"."""
    parts: list[str] = []
    start = 0
    for i in range(len(layers)):
        if i + 1 < len(layers) and layers[i + 1] == layers[i] + 1:
            continue
        first, last = layers[start], layers[i]
        parts.append(str(first) if first == last else f"{first}-{last}")
        start = i + 1
    return ",".join(parts)
