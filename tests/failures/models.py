"""Small models whose page selection affects the output, as engines."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from cairn.cache.invariants import check
from cairn.engine.build import Built
from tests.engine.harness import GOLDENS, Trace, difference, engine, greedy, run

SIZE, WINDOW, TOPK = 16, 32, 4
WIDE = {
    "model_type": "qwen_hils",
    "torch_dtype": "float32",
    "vocab_size": 200,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "chunk_size": SIZE,
    "hils_topk": TOPK,
    "hils_sliding_window": WINDOW,
    "full_attn_interleave": 1,
    "enable_lmk_q_proj": True,
    "lmk_q_lora_dim": 8,
    "apply_hils_rope": True,
    "eos_token_id": 1,
}
"""Eight query heads per KV head, landmarks in both layers."""


def folder(at: Path, **changes) -> Path:
    """A model folder with a config only; weights are random."""
    at.mkdir(parents=True, exist_ok=True)
    (at / "config.json").write_text(json.dumps({**WIDE, **changes}))
    return at


def variant(at: Path, case: str, **changes) -> Path:
    """A golden model with changed config fields and the same weights."""
    config = json.loads((GOLDENS / case / "config.json").read_text())
    at.mkdir(parents=True, exist_ok=True)
    (at / "config.json").write_text(json.dumps({**config, **changes}))
    (at / "model.safetensors").symlink_to(GOLDENS / case / "model.safetensors")
    return at


def wide(at: Path, sharpness: float = 6.0, **options) -> Built:
    """An engine on a random model; `sharpness` scales its landmark queries."""
    built = engine(str(at), **{"load_format": "random", **options})
    sharpen(built, sharpness)
    return built


def sharpen(built: Built, factor: float) -> None:
    """Scale the landmark queries, so that pages differ clearly in score and in prior."""
    with torch.no_grad():
        for block in built.runner.model.layers:
            norm = block.mixer.lmk_q_norm
            (block.mixer.q_norm if norm is None else norm).weight.mul_(factor)


def again(built: Built, prompt: list[int], got: Trace) -> float:
    """Largest difference between a decoded output and a prefill of the same tokens."""
    tokens = prompt + got.tokens
    whole = run(built, [tokens], greedy(1, prompt_logprobs=True), poisoned=False)[0]
    return difference(got.logprobs, whole.prompt_logprobs[len(prompt) - 1 :])


def rows(trace: Trace) -> np.ndarray:
    """Log-probabilities after each prompt token, from a trace with one output token."""
    return np.concatenate(
        [trace.prompt_logprobs.reshape(-1, trace.logprobs.shape[1]), trace.logprobs]
    )


def check_ledger(built: Built) -> None:
    """Every page is either free, cached or owned."""
    running = built.core.scheduler.running
    check(built.core.cache, [r.lease for r in running if r.lease is not None])
