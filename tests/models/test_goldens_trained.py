"""The embedded model compared with logits of the implementation that trained it."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from cairn.config import default_model_path
from cairn.models.registry import load_model, load_spec
from tests.models.conftest import DATA


@pytest.mark.slow  # tests/engine/test_goldens.py compares the same, through the engine.
def test_golden(plain):
    spec = load_spec(default_model_path())
    assert spec.dtype == "bfloat16"
    model = load_model(default_model_path(), spec, "float32", "cpu")
    golden = load_file(DATA / "goldens" / "cairn-7m" / "vectors.safetensors")
    logits, _ = plain(model, golden["input_ids"].long())
    tail = golden["logits_tail"]
    error = (logits[-tail.shape[0] :] - tail).abs().max()
    print(f"{error:.1e} of {tail.abs().max():.1f}")
    assert error < 1e-3  # two float32 implementations differ by 3e-4
    assert torch.equal(logits.argmax(-1), golden["argmax"].long())
