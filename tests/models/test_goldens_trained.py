"""The two trained models against the logits recorded when they were trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cairn.models.registry import load_model, load_spec

MODELS = Path(__file__).parents[1] / "data" / "models"
FOLDERS = {name: MODELS / name for name in ("tiny-hils-2m",)}


@pytest.mark.parametrize("name", FOLDERS)
def test_golden(name, plain):
    spec = load_spec(FOLDERS[name])
    assert spec.dtype == "bfloat16"
    model = load_model(FOLDERS[name], spec, "float32", "cpu")
    golden = load_file(MODELS / name / "golden.safetensors")
    logits, _ = plain(model, golden["input_ids"].long())
    tail = golden["logits_tail"]
    error = (logits[-tail.shape[0] :] - tail).abs().max()
    print(f"{name}: {error:.1e} of {tail.abs().max():.1f}")
    assert error < 1e-3  # two float32 implementations differ by 3e-4
    assert torch.equal(logits.argmax(-1), golden["argmax"].long())
