"""Dense decoders against transformers' own models, logit by logit, through the whole engine."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cairn.config import EngineOptions
from cairn.engine.build import build
from tests.engine.harness import difference, greedy, poison, run

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 301,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "eos_token_id": 300,
    "bos_token_id": 299,
    "pad_token_id": 0,
}
ORIGINAL = {"factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = ORIGINAL | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MODELS = {
    "qwen3": ("Qwen3", {"head_dim": 24, "rope_theta": 1e6}),
    "qwen3 tied": ("Qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "qwen3 yarn": ("Qwen3", {"head_dim": 24, "rope_scaling": ORIGINAL | {"rope_type": "yarn"}}),
    "qwen2 windows": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
    ),
    "mistral window": ("Mistral", {"sliding_window": 50}),
    "llama": ("Llama", {"rope_scaling": LLAMA3}),
    "llama biases": (
        "Llama",
        {"attention_bias": True, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    ),
    "llama dynamic": ("Llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
}


@pytest.fixture(scope="module", params=list(MODELS))
def reference(request, tmp_path_factory):
    """A random model and the folder it was saved in."""
    torch.manual_seed(3)
    name, more = MODELS[request.param]
    config = getattr(transformers, f"{name}Config")(**SIZES | more)
    model = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    folder = tmp_path_factory.mktemp("dense")
    model.save_pretrained(folder)
    return model, folder


def test_prefill_and_decode_equal_transformers(reference):
    model, folder = reference
    options = EngineOptions(dtype="float32", device="cpu", page_size=16, kv_cache_memory="8MiB")
    built = build(folder, options)
    poison(built)
    prompts = [np.random.default_rng(i).integers(0, 300, n).tolist() for i, n in ((1, 260), (2, 9))]
    found = run(built, prompts, greedy(40, prompt_logprobs=True), budgets=[37])
    for prompt, got in zip(prompts, found, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + got.tokens])).logits[0]
        expected = torch.log_softmax(logits, -1).numpy()
        assert difference(got.prompt_logprobs, expected[: len(prompt) - 1]) < 1e-4
        assert difference(got.logprobs, expected[len(prompt) - 1 : -1]) < 1e-4
        assert got.tokens == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
