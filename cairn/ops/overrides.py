"""Overrides of the choice of implementations by the variable CAIRN_OPS."""

from __future__ import annotations

import os
from collections.abc import Iterable

from cairn.errors import BadConfig
from cairn.names import suggestion
from cairn.ops.implementation import REFERENCE

VARIABLE = "CAIRN_OPS"
REGISTERED_LATER = ("sequence_attention",)
"""Ops of packages above `cairn.ops`, which are registered when those are imported."""


def parse(choices: str) -> dict[str, str]:
    """Op name -> implementation name; "*" stands for every op not named."""
    forced: dict[str, str] = {}
    for word in filter(None, (part.strip() for part in choices.split(","))):
        name, equals, implementation = (part.strip() for part in word.partition("="))
        if not equals and name != REFERENCE:
            raise BadConfig(
                f"{VARIABLE} has {word!r}", f"Write {REFERENCE!r} or NAME=IMPLEMENTATION"
            )
        forced["*" if not equals else name] = implementation or REFERENCE
    return forced


def unknown(message: str, name: str, known: Iterable[str]) -> BadConfig:
    """The error for an unknown name; it suggests the nearest known one."""
    return BadConfig(message, suggestion(name, known))


FORCED = parse(os.environ.get(VARIABLE, ""))
"""Op name -> implementation name; "*" stands for every op that is not named."""
