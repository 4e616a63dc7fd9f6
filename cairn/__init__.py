"""cairn: an engine that serves language models over very long contexts.

The names below are imported when they are first used: `import cairn` alone loads no torch.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from cairn.version import __version__ as __version__

if TYPE_CHECKING:
    from cairn.errors import (
        BadConfig,
        BadModel,
        BadRequest,
        Busy,
        CairnError,
        EngineDead,
        OutOfMemory,
        TooLong,
    )
    from cairn.llm import LLM
    from cairn.types import (
        CompletionOutput,
        FinishReason,
        Grammar,
        Logprob,
        RequestOutput,
        SamplingParams,
        TokenLogprobs,
    )

# GNU's OpenMP reads this when torch is first imported. By default waiting threads spin for
# milliseconds: with another program on the same cores, a prefill of 4,000 tokens took 12 s instead
# of 4.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")

_HOMES = {
    "LLM": "cairn.llm",
    "BadConfig": "cairn.errors",
    "BadModel": "cairn.errors",
    "BadRequest": "cairn.errors",
    "Busy": "cairn.errors",
    "CairnError": "cairn.errors",
    "EngineDead": "cairn.errors",
    "OutOfMemory": "cairn.errors",
    "TooLong": "cairn.errors",
    "CompletionOutput": "cairn.types",
    "FinishReason": "cairn.types",
    "Grammar": "cairn.types",
    "Logprob": "cairn.types",
    "RequestOutput": "cairn.types",
    "SamplingParams": "cairn.types",
    "TokenLogprobs": "cairn.types",
}

__all__ = [
    "LLM",
    "BadConfig",
    "BadModel",
    "BadRequest",
    "Busy",
    "CairnError",
    "CompletionOutput",
    "EngineDead",
    "FinishReason",
    "Grammar",
    "Logprob",
    "OutOfMemory",
    "RequestOutput",
    "SamplingParams",
    "TokenLogprobs",
    "TooLong",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'cairn' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
