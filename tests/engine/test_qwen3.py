"""Dense Qwen3 against transformers' own model, logit by logit, through the whole engine."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cairn.config import EngineOptions
from cairn.engine.build import build
from tests.engine.harness import difference, greedy, poison, run

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def reference(request, tmp_path_factory):
    """A random Qwen3 and the folder it was saved in."""
    torch.manual_seed(3)
    config = transformers.Qwen3Config(
        vocab_size=301,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        max_position_embeddings=512,
        tie_word_embeddings=request.param,
        initializer_range=0.2,
        rope_theta=1e6,
        eos_token_id=300,
    )
    model = transformers.Qwen3ForCausalLM(config).float().eval()
    folder = tmp_path_factory.mktemp("qwen3")
    model.save_pretrained(folder)
    return model, folder


@pytest.mark.parametrize("page_size", [16, 64])
def test_prefill_and_decode_equal_transformers(reference, page_size):
    model, folder = reference
    options = EngineOptions(
        dtype="float32", device="cpu", page_size=page_size, kv_cache_memory="8MiB"
    )
    built = build(folder, options)
    poison(built)
    prompt = np.random.default_rng(1).integers(0, 300, 150).tolist()
    (got,) = run(built, [prompt], greedy(40, prompt_logprobs=True), budgets=[37])
    whole = torch.tensor([prompt + got.tokens])
    with torch.inference_mode():
        logits = model(whole).logits[0]
    expected = torch.log_softmax(logits, -1).numpy()
    assert difference(got.prompt_logprobs, expected[: len(prompt) - 1]) < 1e-4
    assert difference(got.logprobs, expected[len(prompt) - 1 : -1]) < 1e-4
    assert got.tokens == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
