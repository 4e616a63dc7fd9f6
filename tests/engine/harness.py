"""Real engines on the small golden models, which report every logit."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from cairn.cache.allocator import PageAllocator
from cairn.cache.frames import Frames
from cairn.cache.paged import Lease, PageCache
from cairn.cache.schema import BYTES
from cairn.config import EngineOptions
from cairn.engine.build import Built, build
from cairn.engine.continuation import Continuation
from cairn.engine.planned_step import Limits
from cairn.ops.cache.quantized import NOT_FINITE
from cairn.runner.memory import NO_STEPS
from cairn.types import SamplingParams

GOLDENS = Path(__file__).parent.parent / "data" / "goldens" / "hils"
CASES = sorted(path.name for path in GOLDENS.iterdir() if path.is_dir())
DIFFER_MOST = ("olmo_mha_interleave4", "qwen_c64", "qwen_gqa4_prior_lora_inrange")
FEW_CASES = [
    case if case in DIFFER_MOST else pytest.param(case, marks=pytest.mark.slow) for case in CASES
]
"""All cases; those that differ most are in the fast suite."""
TRACED = [
    "olmo_mha_interleave4",
    "qwen_c64",
    "qwen_gqa4_prior_lora_inrange",
    "qwen_meanpool_nolmk",
    "qwen_noprior_lmk_k",
]
"""Cases with all intermediate tensors of a layer, at their greatest length."""

ROUNDING = 2e-4
"""Float32 rounding of log-probabilities, whose scale is about 10."""


def engine(case: str, **options) -> Built:
    """An engine in float32 on a golden model without encoder; its free pages are NaN."""
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "kv_cache_memory": "8MiB",
        "max_num_seqs": 16,
        "limit_mm_per_prompt": {"image": 0, "video": 0},
    }
    # On a GPU an engine runs its largest steps to measure memory, which its pages do not depend on.
    with patch("cairn.engine.build.measured", return_value=NO_STEPS):
        built = build(GOLDENS / case, EngineOptions(**{**defaults, **options}))
    poison(built)
    return built


_POISONED: WeakKeyDictionary[PageAllocator, set[int]] = WeakKeyDictionary()


def poison(built: Built) -> None:
    """Fill every page that nobody owns with NaN, if it is not filled already."""
    cache, pools = built.core.cache, built.runner.pools
    _poison(cache.allocator, pools.tensors(group=0), pools.spare)
    if cache.window is not None:
        _poison(cache.window.allocator, pools.tensors(group=1), pools.spare)
    if pools.frames is not None:
        _poison_frames(pools.frames)


def _poison_frames(frames: Frames) -> None:
    """Fill frames that hold no page with NaN."""
    for number, held in enumerate(frames.map.frame_of):
        empty = torch.ones(frames.count, dtype=torch.bool, device=held.device)
        empty[held[held >= 0].long()] = False
        layer, head = divmod(number, frames.heads)
        for tensor in frames.cached.values():
            numbers, nan = poisoned(tensor)
            numbers[layer, empty, head] = nan


def poisoned(tensor: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The tensor or its bytes, and a fill value that decodes to NaN."""
    return (tensor.view(BYTES), NOT_FINITE) if tensor.itemsize == 1 else (tensor, float("nan"))


def _poison(allocator: PageAllocator, tensors: Iterable[torch.Tensor], spare: bool) -> None:
    free = set(allocator.free_pages)
    fresh = sorted(free - _POISONED.get(allocator, set()))
    _POISONED[allocator] = free
    if spare:
        # Nothing reads what the padding of a graph has written there.
        fresh.append(allocator.num_pages)
    if fresh:
        pages = torch.tensor(fresh)
        for tensor in tensors:
            numbers, nan = poisoned(tensor)
            numbers[pages] = nan


def occupy(cache: PageCache, keep: int, keep_window: int | None = None) -> Lease:
    """A lease that leaves `keep` pages to others, and `keep_window` window pages (default `keep`).

    Every request must fit in these alone: the engine checks that against the whole pool.
    """
    lease = cache.open([1], 0)
    while len(lease.pages) < cache.num_pages - keep:
        assert cache.grow(lease, len(lease.pages) + 1)
        cache.pass_windows(lease, len(lease.pages))
    if cache.window is not None:
        left = keep if keep_window is None else keep_window
        lease.window[:0] = cache.window.take(cache.window.available - left)
    return lease


def vectors(case: str) -> dict[str, torch.Tensor]:
    """The reference outputs of a golden case."""
    return load_file(GOLDENS / case / "vectors.safetensors")


def lengths(case: str) -> list[int]:
    """Prompt lengths of a golden case."""
    return sorted(int(name.split(".")[0][1:]) for name in vectors(case) if "input_ids" in name)


@dataclass
class Trace:
    """What a request produced, in comparable form.

    Attributes:
        tokens: generated ids.
        logprobs: [tokens, V], of the position that chose each.
        prompt_logprobs: [prompt - 1, V].
        cached: prompt tokens that came from the prefix cache.
    """

    tokens: list[int]
    logprobs: np.ndarray
    prompt_logprobs: np.ndarray
    cached: int


def dense(entry, vocab: int) -> np.ndarray:
    """Log-probabilities of one position over the vocabulary, [V]."""
    line = np.full(vocab, np.nan)
    line[np.asarray(entry._ids)] = entry._values
    return line


def trace(continuation: Continuation, vocab: int) -> Trace:
    """All fields that a finished output reported."""
    output = continuation.stream.output
    prompt = continuation.prompt_logprobs or []
    return Trace(
        list(output.token_ids),
        np.array([dense(entry, vocab) for entry in output.logprobs or []]),
        np.array([dense(entry, vocab) for entry in prompt[1:]]),
        continuation.request.cached or 0,
    )


def text(seed: int, length: int, vocab: int = 200) -> list[int]:
    """A random prompt."""
    rng = random.Random(seed)
    return [rng.randrange(vocab) for _ in range(length)]


def greedy(max_tokens: int, prompt_logprobs: bool = False) -> SamplingParams:
    """Sampling parameters of greedy decoding with all log-probabilities."""
    return SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        ignore_eos=True,
        logprobs=-1,
        prompt_logprobs=-1 if prompt_logprobs else None,
    )


def run(
    built: Built,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    budgets: Sequence[int] = (),
    poisoned: bool = True,
) -> list[Trace]:
    """Run prompts together, step i with budgets[i % len] slots; free pages are NaN in every
    step."""
    core = built.core
    every = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    live = [
        core.add(f"r{core._arrivals}", list(prompt), param)
        for prompt, param in zip(prompts, every, strict=True)
    ]
    step = 0
    while core.has_work:
        if budgets:
            core.scheduler.limits = Limits(built.config.max_num_seqs, budgets[step % len(budgets)])
        core.step()
        if poisoned:
            poison(built)
        step += 1
    return [trace(continuation, built.spec.vocab_size) for continuation in live]


def difference(a: np.ndarray, b: np.ndarray) -> float:
    """Largest difference of two arrays of log-probabilities; infinite if shapes or NaNs differ."""
    if a.shape != b.shape or np.isnan(a).any() or np.isnan(b).any():
        return float("inf")
    return float(np.abs(a - b).max(initial=0.0))


def assert_same(a: Trace, b: Trace) -> None:
    """Tokens are equal, and log-probabilities up to rounding; also those of the prompt, if
    reported."""
    assert a.tokens == b.tokens
    assert difference(a.logprobs, b.logprobs) < ROUNDING
    assert difference(a.prompt_logprobs, b.prompt_logprobs) < ROUNDING
