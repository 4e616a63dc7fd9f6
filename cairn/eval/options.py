"""Names of tasks, formats and variants. Has no heavy imports, because the command line uses it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

TASKS = ("single", "multi", "tracking")
"""Tasks of `cairn eval needle`."""

FORMATS = ("auto", "lines", "english")
"""Formats of needles."""

RULER_TASKS = (
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_multivalue",
    "niah_multiquery",
    "vt",
    "cwe",
    "fwe",
)
"""RULER's tasks, except the two question answering tasks, which need external data."""


@dataclass(frozen=True, slots=True)
class Variant:
    """An engine configuration that must give the same answers.

    Attributes:
        changes: keywords of LLM that differ.
        warm: prefill the document before the questions, which then find it in the prefix cache.
    """

    changes: dict[str, Any] = field(default_factory=dict)
    warm: bool = False


VARIANTS = {
    "base": Variant(),
    "warm": Variant(warm=True),
    "cold": Variant({"enable_prefix_caching": False}),
    # A prime number, so that chunk borders fall on every position within a page.
    "odd-chunks": Variant({"chunked_prefill_size": 509}),
    "no-graphs": Variant({"disable_cuda_graph": True}),
    "fp8": Variant({"kv_cache_dtype": "fp8_e4m3"}),
    "fp4": Variant({"kv_cache_dtype": "fp4_e2m1"}),
    "dense": Variant({"attention_backend": "dense"}),
    "window": Variant({"attention_backend": "window"}),
}
