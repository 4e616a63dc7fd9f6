"""Baseline: times of transformers' generate with the dense config of a shape."""

from __future__ import annotations

import time
from typing import Any

import torch

from cairn.bench.records import Cell
from cairn.bench.session import random_prompts
from cairn.bench.shapes import config_of
from cairn.errors import BadConfig


def run_yardstick(shape: str, context: int, batch: int, steps: int, dtype: str) -> list[Cell]:
    """Prefill and decode of `transformers` Qwen3ForCausalLM with the shape's dense config.

    Args:
        shape: a key of SHAPES.
        context: prompt length in tokens.
        batch: number of sequences.
        steps: decode steps to average over.
        dtype: "float32" or "bfloat16".

    Returns:
        A prefill cell and a decode cell, without a floor.

    Raises:
        BadConfig: transformers cannot be imported, or the shape is unknown.
    """
    model = _model(shape, dtype)
    prompts = random_prompts(batch, context, int(model.config.vocab_size), seed=3)
    ids = torch.tensor([prompt["prompt_token_ids"] for prompt in prompts])
    _generate(model, ids[:, :16], 2)
    prefill = _generate(model, ids, 1)
    whole = _generate(model, ids, steps + 1)
    step = max(whole - prefill, 1e-9) / steps

    def cell(phase: str, seconds: float, tokens: int) -> Cell:
        return Cell(
            shape=shape,
            phase=phase,
            context=context,
            batch=batch,
            backend="transformers",
            dtype=dtype,
            ms=seconds * 1e3,
            floor_ms=None,
            tokens_per_s=tokens / seconds,
            parameters=model.num_parameters(),
        )

    return [cell("prefill", prefill, batch * context), cell("decode", step, batch)]


def _model(shape: str, dtype: str) -> Any:
    try:
        from transformers import Qwen3Config, Qwen3ForCausalLM
    except ImportError as error:
        raise BadConfig(f"the yardstick needs transformers: {error}") from error
    config = config_of(shape, "dense")
    for name in ("architectures", "model_type", "torch_dtype", "eos_token_id", "bos_token_id"):
        config.pop(name)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**config))
    return model.to(getattr(torch, dtype)).eval()


def _generate(model: Any, ids: torch.Tensor, tokens: int) -> float:
    """Seconds of a greedy generate of exactly `tokens` tokens."""
    began = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
        )
    return time.perf_counter() - began
