"""Engines on the small golden models of the Qwen family, with access to states and inner values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from cairn.cache.invariants import check
from cairn.config import EngineOptions
from cairn.engine.build import Built, build
from cairn.engine.continuation import Continuation
from tests.engine.harness import Limits, Trace, greedy, trace

GOLDENS = Path(__file__).parent.parent / "data" / "goldens" / "qwen35"
CASES = sorted(path.name for path in GOLDENS.iterdir() if path.is_dir())
RECURRENT = [case for case in CASES if not case.startswith("q3moe")]


def engine(case: str | Path, **options) -> Built:
    """An engine in float32 on a golden model, or another folder, without encoder; unowned memory is
    NaN."""
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "kv_cache_memory": "8MiB",
        "max_num_seqs": 4,
        "limit_mm_per_prompt": {"image": 0, "video": 0},
    }
    built = build(GOLDENS / case, EngineOptions(**{**defaults, **options}))
    poison(built)
    return built


def poison(built: Built) -> None:
    """Fill pages, states of rows and snapshots that nobody owns with NaN."""
    cache, pools = built.core.cache, built.runner.pools
    pages = torch.tensor(list(cache.allocator.free_pages), dtype=torch.int64)
    for tensor in pools.tensors():
        tensor[pages] = torch.nan
    states = [*built.core.scheduler._free_rows, pools.sizes.rows]
    if cache.states is not None:
        states += [pools.first_snapshot + n for n in cache.states.allocator.free_pages]
    for tensor in pools.states():
        tensor[torch.tensor(states)] = torch.nan


def step(built: Built) -> None:
    """Run one step, check the ledger and fill free memory with NaN."""
    built.core.step()
    running = built.core.scheduler.running
    check(built.core.cache, [r.lease for r in running if r.lease is not None])
    poison(built)


def start(built: Built, prompt: Sequence[int], tokens: int) -> Continuation:
    """Queue a request that decodes greedily and reports all log-probabilities."""
    name = f"r{built.core._arrivals}"
    return built.core.add(name, list(prompt), greedy(tokens))


def serve(
    built: Built, prompts: Sequence[Sequence[int]], tokens: int, budget: int = 4096
) -> list[Trace]:
    """Run prompts together in steps of at most `budget` slots."""
    built.core.scheduler.limits = Limits(built.config.max_num_seqs, budget)
    live = [start(built, prompt, tokens) for prompt in prompts]
    while built.core.has_work:
        step(built)
    return [trace(continuation, built.spec.vocab_size) for continuation in live]


def golden(case: str, length: int) -> dict[str, Tensor]:
    """Reference tensors of one prompt."""
    found = load_file(GOLDENS / case / "vectors.safetensors")
    head = f"n{length}."
    return {name[len(head) :]: value for name, value in found.items() if name.startswith(head)}


def lengths(case: str) -> list[int]:
    """Prompt lengths of a case."""
    found = load_file(GOLDENS / case / "vectors.safetensors")
    return sorted(int(name.split(".")[0][1:]) for name in found if name.endswith(".input_ids"))


class Watch:
    """Inner values of the model, by the goldens' names, over all steps since `clear`.

    Args:
        built: the engine.
    """

    def __init__(self, built: Built) -> None:
        self._seen: dict[str, list[Tensor]] = defaultdict(list)
        for i, block in enumerate(built.runner.model.layers):
            block.mixer.register_forward_hook(self._mixer(f"l{i}.o"))
            if hasattr(block.ffn, "router"):
                block.ffn.router.register_forward_hook(self._router(f"l{i}."))

    def __getitem__(self, name: str) -> Tensor:
        return torch.cat(self._seen[name])

    def clear(self) -> None:
        """Drop all values."""
        self._seen.clear()

    def _mixer(self, name: str):
        return lambda module, given, delta: self._seen[name].append(delta.x.clone())

    def _router(self, name: str):
        def see(module, given, found) -> None:
            # The shared expert comes after the routed ones.
            weights, experts = (part[:, : module.active] for part in found)
            self._seen[name + "weights"].append(weights)
            self._seen[name + "experts"].append(experts.long())

        return see
