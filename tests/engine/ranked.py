"""Engines with tensor parallelism, whose processes start once for all tests."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import torch

from cairn.config import EngineOptions
from cairn.engine.build import Built, build
from cairn.engine.ranks import CHECKS, Ranks


@functools.cache
def ranks(size: int) -> Ranks:
    """The ranks of a group. They load another model when the next engine is built on them."""
    os.environ[CHECKS] = "1"
    try:
        return Ranks(size, torch.device("cpu"))
    finally:
        del os.environ[CHECKS]


def engine(model: Path | str, size: int, **options) -> Built:
    """An engine in float32 with this many ranks."""
    defaults = {
        "dtype": "float32",
        "device": "cpu",
        "kv_cache_memory": "16MiB",
        "max_num_seqs": 4,
        "limit_mm_per_prompt": {"image": 0, "video": 0},
        "tensor_parallel_size": size,
    }
    given = EngineOptions(**{**defaults, **options})
    return build(Path(model), given, start=lambda config: ranks(size))
