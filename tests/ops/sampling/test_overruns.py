"""Kernels do not read beyond the last row; results would not show it, because such values are
masked."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.sampling import launch
from cairn.ops.select_k.launch import mask_smaller

pytestmark = pytest.mark.skipif(
    not gpu.INTERPRETED, reason="needs Triton, and a machine without CUDA"
)
ROWS, WIDTH, BEHIND = 2, 1500, 8192
"""Numbers of memory behind the rows that nobody else has."""


def draw(probs: Tensor, **filters: Tensor) -> Tensor:
    source, uniform = launch.Source(probs), torch.rand(ROWS)
    return launch.draw(source, launch.Filters(**filters), None, uniform, torch.int32)


def draw_of_logits(logits: Tensor, temperature: float = 1.0, **filters: Tensor) -> Tensor:
    source = launch.Source(logits, softmax=True, temperature=torch.full((ROWS,), temperature))
    seeds = torch.arange(ROWS)
    return launch.draw(source, launch.Filters(**filters), seeds, seeds, torch.int64)


K, P = torch.tensor([5, 300]), torch.tensor([0.9, 0.5])
CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "top k of logits": lambda x: mask_smaller(x, K),
    "top k": lambda x: launch.filter_probs(x, launch.Filters(top_k=K)),
    "top p": lambda x: launch.filter_probs(x, launch.Filters(top_p=P)),
    "min p": lambda x: launch.filter_probs(x, launch.Filters(min_p=P * 0.1)),
    "draw from a nucleus": lambda x: draw(x, top_p=P),
    "argmax": launch.argmax,
    "draw": draw,
    "draw from both": lambda x: draw(x, top_k=K, top_p=P),
    "draw of logits": draw_of_logits,
    "draw of logits from a share": lambda x: draw_of_logits(x, top_p=P),
    "draw of logits from lines": lambda x: draw_of_logits(x, 1e-5, top_k=K * 0, top_p=P),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_nothing_is_read_behind_the_rows(
    call: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    memory = torch.empty(ROWS * WIDTH + BEHIND)
    rows = memory[: ROWS * WIDTH].view(ROWS, WIDTH)
    # Most draws fall into the last chunk.
    rows.copy_((torch.randn(ROWS, WIDTH) + torch.arange(WIDTH) * 0.01).softmax(-1))
    end = memory.data_ptr() + 4 * ROWS * WIDTH
    builder: Any = import_module("triton.runtime.interpreter").interpreter_builder
    load = builder.create_masked_load
    seen = []

    def watched(places: Any, mask: Any, *rest: Any) -> Any:
        live = np.broadcast_to(mask.data, places.data.shape)
        behind = (places.data >= end) & (places.data < end + 4 * BEHIND)
        assert not (live & behind).any()
        seen.append((places.data < end).any())
        return load(places, mask, *rest)

    monkeypatch.setattr(builder, "create_masked_load", watched)
    call(rows)
    assert any(seen)
