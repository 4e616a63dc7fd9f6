"""Dense decoders compared with transformers' models, logit by logit, through the whole engine."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cairn.config import EngineOptions
from cairn.engine.build import build
from tests.engine.harness import assert_same, difference, greedy, poison, run, text
from tests.support import shows

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
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 20,
            "sliding_window": 50,
            "sliding_window_pattern": 3,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "llama dynamic": ("Llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
}


@pytest.fixture(scope="module", params=list(MODELS))
def reference(request, tmp_path_factory):
    """A random model and its folder."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    name, more = MODELS[request.param]
    text = "TextConfig" if name == "Gemma3" else "Config"
    config = getattr(transformers, f"{name}{text}")(**SIZES | more)
    model = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith(("bias", "norm.weight")):
            torch.nn.init.normal_(parameter, std=0.2)
    folder = tmp_path_factory.mktemp("dense")
    model.save_pretrained(folder)
    return model, folder


def engine(folder, **options):
    """An engine in float32 whose free pages are NaN."""
    defaults = {"dtype": "float32", "device": "cpu", "page_size": 16, "kv_cache_memory": "8MiB"}
    built = build(folder, EngineOptions(**{**defaults, **options}))
    poison(built)
    return built


@shows("llama mistral qwen2 qwen3 gemma3", "reference logits", "chunked prefill")
@shows("mistral qwen2 gemma3", "sliding window")
def test_prefill_and_decode_equal_transformers(reference):
    model, folder = reference
    built = engine(folder)
    prompts = [np.random.default_rng(i).integers(0, 300, n).tolist() for i, n in ((1, 260), (2, 9))]
    found = run(built, prompts, greedy(40, prompt_logprobs=True), budgets=[37])
    for prompt, got in zip(prompts, found, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + got.tokens])).logits[0]
        expected = torch.log_softmax(logits, -1).numpy()
        assert difference(got.prompt_logprobs, expected[: len(prompt) - 1]) < 1e-4
        assert difference(got.logprobs, expected[len(prompt) - 1 : -1]) < 1e-4
        assert got.tokens == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


FEW = [
    "qwen3",
    "mistral window",
    "gemma3",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2 windows", "llama")),
]
"""The slow ones have no kind of layer that the others lack."""


@shows("llama mistral qwen2 qwen3 gemma3", "batching", "prefix cache")
@pytest.mark.parametrize("reference", FEW, indirect=True)
def test_a_batch_and_a_cached_prefix(reference):
    """Four prompts together, then again with cached pages, compared with each prompt alone."""
    built = engine(reference[1])
    prompts = [text(seed, length, 299) for seed, length in enumerate((1, 33, 150, 90))]
    alone = [run(engine(reference[1]), [prompt], greedy(20))[0] for prompt in prompts]
    for cached in (0, 128):
        together = run(built, prompts, greedy(20), budgets=[40])
        assert together[2].cached >= cached
        for got, wanted in zip(together, alone, strict=True):
            assert_same(got, wanted)


@shows("llama mistral qwen2 qwen3 gemma3", "overlap")
@pytest.mark.parametrize("reference", FEW, indirect=True)
def test_planned_while_a_step_runs(reference):
    prompts = [text(seed, length, 299) for seed, length in enumerate((5, 60, 100))]
    found = []
    for overlap in (True, False):
        built = engine(reference[1])
        built.core.overlap = overlap
        found.append(run(built, prompts, greedy(30), budgets=[50]))
    for got, wanted in zip(*found, strict=True):
        assert_same(got, wanted)


@shows("llama mistral qwen2 qwen3", "CUDA graph")
@pytest.mark.gpu
@pytest.mark.parametrize(
    "reference", ["qwen3", "qwen2 windows", "mistral window", "llama"], indirect=True
)
def test_graphs_against_operation_by_operation(reference):
    prompts = [text(seed, length, 299) for seed, length in enumerate((5, 60, 300))]
    graphs, eager = (
        engine(reference[1], device="cuda", disable_cuda_graph=off) for off in (False, True)
    )
    assert graphs.runner.graphs is not None and eager.runner.graphs is None
    for got, wanted in zip(
        *(run(b, prompts, greedy(40), budgets=[64]) for b in (graphs, eager)), strict=True
    ):
        assert_same(got, wanted)


@shows("llama mistral qwen3", "quantised KV")
@pytest.mark.parametrize("reference", ["qwen3", "mistral window", "llama"], indirect=True)
def test_keys_and_values_in_8_bits(reference):
    prompt = text(1, 150, 299)
    exact, coarse = (
        run(engine(reference[1], kv_cache_dtype=kind), [prompt], greedy(1, prompt_logprobs=True))[0]
        for kind in ("auto", "fp8_e4m3")
    )
    divergence = np.exp(exact.prompt_logprobs) * (exact.prompt_logprobs - coarse.prompt_logprobs)
    assert 0 < divergence.sum(-1).mean() < 0.15
