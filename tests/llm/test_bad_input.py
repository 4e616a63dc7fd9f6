"""Invalid input raises one clear error, leaks nothing, and other requests continue."""

from __future__ import annotations

import json
import math
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from cairn import LLM, BadConfig, BadModel, BadRequest, OutOfMemory, SamplingParams, TooLong
from tests.llm.conftest import assert_idle

GOOD = {"prompt_token_ids": [5, 6, 7]}
GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


@pytest.fixture
def answer(token_llm):
    """The output for a good prompt, which is generated again after each error."""
    return token_llm.generate(GOOD, GREEDY)[0].outputs[0].token_ids


def refuse(llm, answer, error, words, *prompts, **given):
    """The call raises a one-line error, alone and with good prompts; then a good prompt works."""
    for batch in (list(prompts), [GOOD, *prompts, GOOD]):
        with pytest.raises(error, match=words) as caught:
            llm.generate(batch, **{"sampling_params": GREEDY, **given})
        assert "\n" not in str(caught.value)
        assert_idle(llm)
    assert llm.generate(GOOD, GREEDY)[0].outputs[0].token_ids == answer


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ({"prompt_token_ids": []}, "the prompt is empty"),
        ({"prompt_token_ids": [5, 256]}, "token id 256 is out of range. Ids go from 0 to 255"),
        ({"prompt_token_ids": [-1, 5]}, "token id -1 is out of range"),
        ({"prompt_token_ids": [2**70]}, f"token id {2**70} is out of range"),
        ({"prompt_token_ids": [1.5]}, "integers, not 1.5"),
        ({"prompt_token_ids": [float("nan")]}, "integers, not nan"),
        ({"prompt_token_ids": [True]}, "integers, not True"),
        ({"prompt_token_ids": [None]}, "integers, not None"),
        ({"prompt_token_ids": [[1]]}, r"integers, not \[1\]"),
        ({"prompt_token_ids": "abc"}, "list of integers, not str"),
        ({"prompt_token_ids": None}, "list of integers, not NoneType"),
        ({"prompt_token_ids": 5}, "list of integers, not int"),
        ({"prompt_token_ids": torch.tensor(5)}, "list of integers, not Tensor"),
        ({"promt_token_ids": [5]}, "Did you mean 'prompt_token_ids'"),
        ({"prompt": "text"}, "no tokenizer.*prompt_token_ids"),
        ("text", "no tokenizer.*prompt_token_ids"),
        (5, "text or a mapping, not int"),
        (None, "text or a mapping, not NoneType"),
        ({"prompt_token_ids": [5] * 4096}, "4096 tokens.*4096 "),
        ({"prompt_token_ids": [5] * 9999}, "9999 tokens.*4096 "),
    ],
    ids=lambda value: str(value)[:40],
)
def test_prompts(token_llm, answer, prompt, words):
    refuse(token_llm, answer, BadRequest, words, prompt)


def test_text_prompts(llm):
    for prompt in ("", {"prompt": ""}, {}):
        with pytest.raises(BadRequest, match="the prompt is empty"):
            llm.generate(prompt)
    with pytest.raises(BadRequest, match="text or a mapping, not int"):
        llm.generate({"prompt": 5})
    with pytest.raises(BadRequest, match="the prompt is empty"):
        next(llm.stream(""))


@pytest.mark.parametrize("prompts", [None, 5, 1.5])
def test_prompts_that_are_no_list(token_llm, prompts):
    with pytest.raises(BadRequest, match="prompts must be a prompt or a list"):
        token_llm.generate(prompts)


def test_longer_than_the_pool(token_folder):
    """The error names both numbers; the longest prompt that fits works."""
    llm = LLM(token_folder, kv_cache_memory=12000 * 9)
    longest = llm.max_model_len
    assert longest < 4096
    good = {"prompt_token_ids": [5] * (longest - 3)}
    want = llm.generate(good, GREEDY)[0].outputs[0].token_ids
    assert len(want) == 3
    for length in (longest, longest + 1, 5000):
        with pytest.raises(TooLong, match=f"{length} tokens.* {longest} .*kv_cache_memory"):
            llm.generate({"prompt_token_ids": [5] * length}, GREEDY)
    assert_idle(llm)
    assert llm.generate(good, GREEDY)[0].outputs[0].token_ids == want


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [NAN, -0.1, INF, -INF, "1", None, True]),
        ("top_p", [NAN, 0.0, -1, 1.1, None]),
        ("top_k", [-2, 1.5, NAN, None, True]),
        ("min_p", [NAN, -0.1, 1.1]),
        ("n", [0, -1, 1.5, None]),
        ("max_tokens", [-1, 2.0, NAN]),
        ("min_tokens", [-1, 17, None, NAN]),
        ("seed", [1.5, "1", 2**64, -(2**63) - 1, NAN]),
        ("presence_penalty", [NAN, -2.1, 2.1, INF]),
        ("frequency_penalty", [NAN, -2.1, 2.1, INF]),
        ("repetition_penalty", [NAN, 0.0, -1.0, INF]),
        ("logprobs", [-2, 1.5, NAN, "5", True]),
        ("prompt_logprobs", [-2, 1.5, NAN]),
        ("stop", [[""], [5], ["a", None]]),
        ("stop_token_ids", [[-1], ["a"], [1.5], [True]]),
        ("logit_bias", [{-1: 0.0}, {5: NAN}, {5: 101.0}, {"5": 1.0}, {5: None}]),
        ("ignore_eos", [1, None, "yes"]),
    ],
)
def test_sampling_values(name, values):
    for value in values:
        with pytest.raises(BadRequest, match=name) as caught:
            SamplingParams(**{name: value})
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"stop_token_ids": [256]}, "stop_token_ids has token id 256.*0 to 255"),
        ({"logit_bias": {300: 1.0}}, "logit_bias has token id 300.*0 to 255"),
        ({"logprobs": 257}, "logprobs is 257.*256 tokens.*-1"),
        ({"prompt_logprobs": 300}, "prompt_logprobs is 300"),
        ({"stop": "END"}, "no tokenizer.*stop_token_ids"),
        ({"min_tokens": 2, "stop_token_ids": range(256)}, "every token id ends the output"),
    ],
    ids=str,
)
def test_sampling_values_that_do_not_fit_the_model(token_llm, answer, params, words):
    refuse(token_llm, answer, BadRequest, words, GOOD, sampling_params=SamplingParams(**params))


def test_unknown_sampling_parameter():
    with pytest.raises(BadRequest, match="temprature.*Did you mean 'temperature'"):
        SamplingParams(temprature=1.0)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([GREEDY], "1 sampling_params for 2 prompts"),
        ([GREEDY, None], "must be SamplingParams"),
        ({"temperature": 0.0}, "must be SamplingParams"),
        ("greedy", "must be SamplingParams"),
        (0.5, "must be SamplingParams"),
    ],
)
def test_sampling_params_of_the_wrong_kind(token_llm, given, words):
    with pytest.raises(BadRequest, match=words):
        token_llm.generate([GOOD, GOOD], given)


@pytest.mark.parametrize(
    ("name", "close"),
    [("max_model_length", "max_model_len"), ("kv_cache_mem", "kv_cache_memory"), ("zzzz", None)],
)
def test_unknown_option(token_folder, name, close):
    words = f"LLM has no option '{name}'. " + (f"Did you mean '{close}'" if close else "Known: ")
    with pytest.raises(BadRequest, match=re.escape(words)):
        LLM(token_folder, **{name: 1})


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"page_size": 64}, BadConfig, "page_size is 64.*chunk_size 16.*--page-size 16"),
        ({"page_size": 1}, BadConfig, "--page-size 16"),
        ({"page_size": 0}, BadConfig, "page_size must be a positive integer, not 0"),
        ({"dtype": "int8"}, BadConfig, "dtype is 'int8'.*float32"),
        ({"device": "tpu"}, BadConfig, "device is 'tpu'"),
        ({"device": 0}, BadConfig, "device is 0"),
        ({"device": "cuda:x"}, BadConfig, "device is 'cuda:x'"),
        ({"attention_backend": "flash"}, BadConfig, "attention_backend is 'flash'.*hsa"),
        ({"hsa_topk": 0}, BadConfig, "hsa_topk"),
        ({"hsa_selection_strategy": "best"}, BadConfig, "softmax_head"),
        ({"hsa_layers": "9"}, BadConfig, "layer 9, but the model has 2"),
        ({"hsa_layers": "x"}, BadConfig, "hsa_layers has 'x'"),
        ({"max_model_len": 5000}, BadConfig, "5000.*4096"),
        ({"max_model_len": -5}, BadConfig, "max_model_len"),
        ({"max_num_seqs": 0}, BadConfig, "max_num_seqs"),
        ({"chunked_prefill_size": 0.5}, BadConfig, "chunked_prefill_size"),
        ({"kv_cache_memory": "many"}, BadConfig, "kv_cache_memory is 'many'"),
        ({"kv_cache_memory": math.nan}, BadConfig, "kv_cache_memory is nan"),
        ({"kv_cache_memory": -1}, BadConfig, "kv_cache_memory is -1"),
        ({"kv_cache_memory": 100}, OutOfMemory, "one page needs .* kv_cache_memory is 100"),
        (
            {"kv_cache_memory": 100000, "max_model_len": 4000},
            OutOfMemory,
            "max_model_len 4000 needs .* kv_cache_memory is 100000.*at least",
        ),
        ({"gpu_memory_utilization": 2}, BadConfig, "must be a share in \\(0, 1\\], not 2"),
        (
            {"gpu_memory_utilization": 0.5, "device": "cpu"},
            BadConfig,
            "the device is cpu.*--kv-cache-memory",
        ),
        ({"disable_cuda_graph": "no"}, BadConfig, "disable_cuda_graph must be true or false"),
        ({"seed": "x"}, BadConfig, "seed"),
        ({"load_format": "pickle"}, BadConfig, "load_format"),
    ],
    ids=str,
)
def test_options(token_folder, options, error, words):
    with pytest.raises(error, match=words) as caught:
        LLM(token_folder, **options)
    assert "\n" not in str(caught.value)


def test_more_pages_than_the_host_has_memory(token_folder, monkeypatch):
    monkeypatch.setattr("cairn.engine.build.free_host_memory", lambda: 50_000)
    with pytest.raises(OutOfMemory, match="no more than 50000 are free.*to at most 50000"):
        LLM(token_folder, kv_cache_memory="1GiB")


@pytest.fixture
def copy(tmp_path, token_folder):
    """A model folder to corrupt."""
    return shutil.copytree(token_folder, tmp_path / "model")


def rewrite(folder, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= changes
    (folder / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if v is not ...})
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "llama9"}, "model_type is 'llama9'.*Known: .*qwen_hils"),
        ({"model_type": ...}, "unknown.*Known"),
        ({"num_attention_heads": 7}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 64}, "head_dim"),
        ({"chunk_size": 1}, "chunk_size"),
        ({"hils_sliding_window": 0}, "hils_sliding_window"),
        ({"hils_topk": 0}, "hils_topk"),
        ({"adjust_lmk_pos": False}, "adjust_lmk_pos"),
        ({"vocab_size": 4000}, "vocab_size|embed"),
        ({"hidden_size": 256, "head_dim": ...}, "misshapen"),
        ({"num_hidden_layers": 3}, "missing: model.layers.2"),
        ({"num_hidden_layers": 1}, "unexpected: model.layers.1"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
    ids=str,
)
def test_configs_that_cannot_be(copy, changes, words):
    rewrite(copy, **changes)
    with pytest.raises(BadModel, match=words) as caught:
        LLM(copy)
    assert "\n" not in str(caught.value)


def drop(tensors):
    del tensors["model.layers.1.self_attn.q_proj.weight"]


def add(tensors):
    tensors["model.layers.1.self_attn.extra.weight"] = torch.zeros(3)


def reshape(tensors):
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name][:-1].contiguous()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (drop, "missing: model.layers.1.self_attn.q_proj.weight"),
        (add, "unexpected: model.layers.1.self_attn.extra.weight"),
        (reshape, "misshapen: model.layers.0.mlp.up_proj.weight"),
    ],
)
def test_weights_that_do_not_fit(copy, damage, words):
    tensors = load_file(copy / "model.safetensors")
    damage(tensors)
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(BadModel, match=words) as caught:
        LLM(copy)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kept", [0, 5, 500, 100_000])
def test_truncated_weights(copy, kept):
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(BadModel, match="model.safetensors is truncated or corrupt"):
        LLM(copy)


def test_missing_files(copy, tmp_path):
    (copy / "model.safetensors").unlink()
    with pytest.raises(BadModel, match="holds no weights"):
        LLM(copy)
    (copy / "config.json").unlink()
    with pytest.raises(BadModel, match="has no config.json"):
        LLM(copy)
    with pytest.raises(BadModel, match="nowhere is not a folder"):
        LLM(tmp_path / "nowhere")


def test_a_broken_tokenizer(copy):
    (copy / "tokenizer.json").write_text("{not json")
    with pytest.raises(BadModel, match="tokenizer in .* cannot be read.*prompt_token_ids"):
        LLM(copy)


def test_a_refused_model_leaves_the_running_one_alone(token_llm, answer, copy):
    rewrite(copy, hidden_size=256)
    with pytest.raises(BadModel):
        LLM(copy)
    assert token_llm.generate(GOOD, GREEDY)[0].outputs[0].token_ids == answer
