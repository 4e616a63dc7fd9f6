"""Ids that end an output, from config.json, generation_config.json and the tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from cairn import LLM, SamplingParams
from cairn.engine.tokenizer import Tokenizer
from cairn.types import Grammar
from tests.engine import vocabularies

VOCAB = 512
"""Larger than the tokenizer's, because vocabularies are padded."""

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory) -> Path:
    return vocabularies.qwen(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def ids(tokenizer_folder) -> dict[str, int]:
    """Token ids by name."""
    tokenizer = Tokenizer(tokenizer_folder)
    names = ("<|im_end|>", "<|endoftext|>", "<|im_start|>")
    return {name: tokenizer.encode(name)[0] for name in names}


@pytest.fixture
def load(tokenizer_folder, tmp_path):
    """A random model whose files name the given end ids; "absent" omits the field."""

    def made(config="absent", generation="absent", tokenizer="absent") -> LLM:
        folder = tmp_path / "model"
        shutil.copytree(tokenizer_folder, folder)
        fields = CONFIG if config == "absent" else {**CONFIG, "eos_token_id": config}
        (folder / "config.json").write_text(json.dumps(fields))
        if generation != "absent":
            text = json.dumps({"eos_token_id": generation})
            (folder / "generation_config.json").write_text(text)
        about = json.loads((folder / "tokenizer_config.json").read_text())
        del about["eos_token"]
        if tokenizer != "absent":
            about["eos_token"] = tokenizer
        (folder / "tokenizer_config.json").write_text(json.dumps(about))
        options = {"dtype": "float32", "device": "cpu", "kv_cache_memory": "1MiB"}
        return LLM(folder, load_format="random", **options)

    return made


def ended_by(llm: LLM, token: int) -> bool:
    """Whether an id that the model is forced to generate ends the output."""
    params = SamplingParams(temperature=0, max_tokens=3, logit_bias={token: 100.0})
    (result,) = llm.generate(["hi"], params)
    (output,) = result.outputs
    assert (output.finish_reason == "stop") == (len(output.token_ids) == 1)
    return output.finish_reason == "stop"


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        (None, "absent", {"<|im_end|>"}),
        (["<|endoftext|>"], None, {"<|im_end|>", "<|endoftext|>"}),
        ("<|endoftext|>", ["<|im_start|>"], {"<|im_end|>", "<|endoftext|>", "<|im_start|>"}),
    ],
)
def test_the_three_places_are_joined(load, ids, config, generation, ends):
    def as_ids(value):
        return [ids[name] for name in value] if isinstance(value, list) else ids.get(value, value)

    llm = load(as_ids(config), as_ids(generation), "<|im_end|>")
    assert {name for name, token in ids.items() if ended_by(llm, token)} == ends


@pytest.mark.parametrize("form", ["text", "object", "map"])
def test_the_tokenizer_names_its_end_in_any_form(tokenizer_folder, ids, form, tmp_path):
    token = {"content": "<|im_end|>", "lstrip": False, "rstrip": False, "normalized": False}
    forms = {
        "text": ("tokenizer_config", {"eos_token": "<|im_end|>"}),
        "object": ("tokenizer_config", {"eos_token": {"__type": "AddedToken", **token}}),
        "map": ("special_tokens_map", {"eos_token": token}),
    }
    shutil.copy(tokenizer_folder / "tokenizer.json", tmp_path)
    name, content = forms[form]
    (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert Tokenizer(tmp_path).eos_token_id == ids["<|im_end|>"]


def test_ids_that_no_file_names_end_nothing(load, ids):
    llm = load(tokenizer=None)
    assert not any(ended_by(llm, token) for token in ids.values())
    (result,) = llm.generate(["hi"], SamplingParams(max_tokens=2, ignore_eos=True))
    assert len(result.outputs[0].token_ids) == 2


def test_a_grammar_ends_with_the_tokenizer_s_id(load, ids):
    # An id beyond the vocabulary ends nothing.
    llm = load([ids["<|endoftext|>"], VOCAB + 5], VOCAB, tokenizer="<|im_end|>")
    end = ids["<|im_end|>"]
    assert llm.engine.core.shape.eos_ids == (ids["<|endoftext|>"], end)
    params = SamplingParams(
        temperature=0, max_tokens=5, grammar=Grammar("regex", "a+"), logit_bias={end: 100.0}
    )
    (result,) = llm.generate(["hi"], params)
    assert (result.outputs[0].text, result.outputs[0].finish_reason) == ("a", "stop")
