"""Sampling parameters that a model's generation_config.json recommends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cairn.errors import BadModel, BadRequest
from cairn.types import SamplingParams

FILE = "generation_config.json"
NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields of the file that mean the same in SamplingParams."""


def recommended_sampling(folder: Path) -> dict[str, Any]:
    """Values by their names in SamplingParams; empty where the folder recommends none.

    Raises:
        BadModel: the file cannot be read, or a value is no such parameter.
    """
    path = folder / FILE
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise BadModel(f"{path} is not JSON: {error}", "Copy the file again") from None
    if not isinstance(content, dict):
        raise BadModel(f"{path} is not a JSON object", "Copy the file again")
    found = {name: content[name] for name in NAMES if content.get(name) is not None}
    top_k = found.get("top_k")
    if isinstance(top_k, float) and top_k.is_integer():
        found["top_k"] = int(top_k)
    try:
        SamplingParams(**found)
    except BadRequest as error:
        raise BadModel(
            f"{path}: {error.message}", "Correct it, or leave it out with sampling defaults openai"
        ) from None
    return found
