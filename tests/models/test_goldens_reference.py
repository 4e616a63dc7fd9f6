"""All golden cases of the reference model, with the plain attention of conftest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from cairn.models.registry import load_model, load_spec

GOLDENS = Path(__file__).parents[1] / "data" / "goldens" / "hils"
CASES = sorted(path.name for path in GOLDENS.iterdir() if path.is_dir())
BOUND = 2e-5  # of the logit scale; two implementations differ by 6e-6, a mistake by 1e-2


def test_the_cases_are_there():
    assert len(CASES) == 10


@pytest.mark.parametrize("case", CASES)
def test_golden(case, plain):
    spec = load_spec(GOLDENS / case)
    model = load_model(GOLDENS / case, spec, torch.float32, "cpu")
    vectors = load_file(GOLDENS / case / "vectors.safetensors")
    with safe_open(GOLDENS / case / "vectors.safetensors", framework="pt") as file:
        meta = file.metadata()
    layer = int(meta["traced_layer"])
    for n in map(int, meta["lengths"].split(",")):
        golden = {k.split(".", 1)[1]: v for k, v in vectors.items() if k.startswith(f"n{n}.")}
        logits, batch = plain(model, golden["input_ids"])
        assert torch.equal(batch.input_ids, golden["engine_ids"])
        assert torch.equal(batch.positions, golden["position_ids"])
        expected = golden["prefill_logits"]
        assert logits.shape == expected.shape and logits.dtype == torch.float32
        error = (logits - expected).abs().max() / expected.abs().max()
        print(f"{case} n={n}: {error:.1e}")
        assert error < BOUND
        traced = batch.traced[layer]
        for name in ("o", "q", "k", "v", "lmk_q", "lse", "swa_o", "lmk_k", "prior_b"):
            if name in golden:
                torch.testing.assert_close(traced[name], golden[name], rtol=1e-4, atol=1e-4)
        if "indices" in golden:
            own = spec.mixers[layer]
            group = own.num_heads // own.num_kv_heads
            ids = golden["indices"].long().transpose(0, 1)  # [h_kv, L, K]
            chosen = torch.zeros(*ids.shape[:2], traced["chosen"].shape[-1] + 1, dtype=torch.bool)
            chosen.scatter_(-1, ids.where(ids >= 0, chosen.shape[-1] - 1), True)
            assert torch.equal(chosen[..., :-1], traced["chosen"][::group])


@pytest.mark.parametrize("case", CASES)
def test_first_greedy_token_is_the_last_user_token_s(case, plain):
    """Also for prompts that end directly before a landmark."""
    spec = load_spec(GOLDENS / case)
    model = load_model(GOLDENS / case, spec, torch.float32, "cpu")
    vectors = load_file(GOLDENS / case / "vectors.safetensors")
    n = spec.page_size - 1
    logits, _ = plain(model, vectors[f"n{n}.input_ids"])
    assert int(logits[-1].argmax()) == int(vectors[f"n{n}.greedy_ids"][0])
