import json
from dataclasses import fields

import pytest

from cairn.cli.generate import generate
from cairn.cli.options import ENGINE_NAMES
from cairn.config import EngineOptions, default_model_path
from cairn.types import Grammar, SamplingParams
from tests.fake_llm import FakeLLM


def test_streams_the_text(run, llms):
    code, out, err = run("generate", "--prompt", "hello")
    assert (code, out, err) == (0, "an answer\n", "")
    assert llms[0].model == str(default_model_path())
    assert llms[0].options == {}
    assert llms[0].calls == [("hello", SamplingParams(max_tokens=128))]
    assert llms[0].closed


def test_prompt_from_a_file_keeps_its_bytes(run, llms, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_bytes("one\r\ntwo é".encode())
    assert run("generate", "--prompt-file", str(file))[0] == 0
    assert llms[0].calls[0][0] == "one\r\ntwo é"


def test_prompt_from_stdin(run, llms):
    assert run("generate", stdin=b"from a pipe\n")[0] == 0
    assert llms[0].calls[0][0] == "from a pipe\n"


def test_stdin_that_is_no_text(run, llms):
    code, _, err = run("generate", stdin=b"\xff\xfe")
    assert code == 2
    assert "stdin is not UTF-8" in err
    assert llms == []


def test_token_prompt(run, llms):
    assert run("generate", "--prompt-token-ids", "1,2,3")[0] == 0
    assert llms[0].calls[0][0] == {"prompt_token_ids": [1, 2, 3]}


def test_without_a_tokenizer_ids_are_shown(run, llms, monkeypatch):
    monkeypatch.setattr("tests.fake_llm.FakeLLM.answer", staticmethod(lambda prompt: ""))
    monkeypatch.setattr("tests.fake_llm.FakeLLM.has_tokenizer", False)
    assert run("generate", "--prompt-token-ids", "1")[1] == "7,8\n"
    assert run("generate", "--prompt-token-ids", "1", "--n", "2")[1] == "7,8\n7,8\n"


@pytest.mark.parametrize("options", [(), ("--chat",)])
def test_an_empty_text_is_shown_as_one(run, llms, monkeypatch, options):
    """An output that ends at once, by a stop string or end of text, prints no ids."""
    monkeypatch.setattr("tests.fake_llm.FakeLLM.answer", staticmethod(lambda prompt: ""))
    assert run("generate", "--prompt", "x", *options)[1] == "\n"


@pytest.mark.parametrize("options", [(), ("--json",), ("--n", "2")])
def test_a_failure_of_the_engine_is_one(run, llms, monkeypatch, options):
    monkeypatch.setattr("tests.fake_llm.FakeLLM.finish_reason", "error")
    code, out, err = run("generate", "--prompt", "x", *options)
    assert code == 1 and "an answer" in out
    assert "error: the engine failed on this prompt. The log above says where" in err
    assert llms[0].closed


def test_chat(run, llms):
    assert run("generate", "--chat", "--prompt", "hello")[1] == "an answer\n"
    assert llms[0].calls[0][0] == "hello"


def test_several_continuations(run, llms):
    code, out, err = run("generate", "--prompt", "x", "--n", "2")
    assert (code, out, err) == (0, "an answer\nan answer\n", "[0]\n[1]\n")


def test_json_holds_log_probabilities(run, llms):
    code, out, _ = run("generate", "--prompt", "x", "--json", "--logprobs", "2")
    output = json.loads(out)["outputs"][0]
    assert code == 0
    assert output["text"] == "an answer"
    assert output["logprobs"][0]["65"] == {"logprob": -0.1, "rank": 1, "decoded_token": None}


SAMPLING = (
    "--n 2 --temperature 0.5 --top-p 0.9 --top-k 5 --min-p 0.1 --sampling-seed 7 --max-tokens 9 "
    "--min-tokens 2 --stop a --stop b --stop-token-ids 10,46 --ignore-eos --logprobs 1 "
    "--prompt-logprobs -1 --presence-penalty 0.5 --frequency-penalty -0.5 "
    "--repetition-penalty 1.5 --logit-bias 65=-3.5 --logit-bias 66=1 --grammar regex=[a-z]=+ "
    "--selection --json"
)


def test_every_sampling_option(run, llms):
    assert run("generate", "--prompt", "x", *SAMPLING.split())[0] == 0
    assert llms[0].calls[0][1] == SamplingParams(
        n=2,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        seed=7,
        max_tokens=9,
        min_tokens=2,
        stop=("a", "b"),
        stop_token_ids=(10, 46),
        ignore_eos=True,
        logprobs=1,
        prompt_logprobs=-1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        logit_bias={65: -3.5, 66: 1.0},
        grammar=Grammar("regex", "[a-z]=+"),
        selection=True,
    )


def test_grammar_from_a_file(run, llms, tmp_path):
    file = tmp_path / "schema.json"
    file.write_text('{"type": "object"}')
    assert run("generate", "--prompt", "x", "--grammar", f"json_schema=@{file}")[0] == 0
    assert llms[0].calls[0][1].grammar == Grammar("json_schema", '{"type": "object"}')


def test_every_field_has_an_option():
    names = {parameter.name for parameter in generate.params}
    assert {field.name for field in fields(SamplingParams)} <= names
    # The server sets the last one.
    other = {"seed", "enable_prefix_caching", "expert_engines"}
    assert {field.name for field in fields(EngineOptions)} == {*ENGINE_NAMES, *other}
    assert {*ENGINE_NAMES, "engine_seed", "no_prefix_caching"} <= names


ENGINE = (
    "--dtype bfloat16 --device cpu --attention-backend hsa --max-model-len 4096 "
    "--kv-cache-memory 4GiB --page-size 64 --max-num-seqs 3 --chunked-prefill-size 100 --seed 5 "
    "--no-prefix-caching --hsa-topk 8 --hsa-selection-strategy head --hsa-layers 0-3,7 "
    "--hsa-window-size 256 --hsa-lmk-id -1 --load-format random --disable-cuda-graph "
    "--kv-cache-dtype fp8_e4m3"
)


def test_every_engine_option(run, llms):
    assert run("generate", "folder", "--prompt", "x", *ENGINE.split())[0] == 0
    assert llms[0].model == "folder"
    assert llms[0].options == {
        "dtype": "bfloat16",
        "device": "cpu",
        "attention_backend": "hsa",
        "max_model_len": 4096,
        "kv_cache_memory": "4GiB",
        "page_size": 64,
        "max_num_seqs": 3,
        "chunked_prefill_size": 100,
        "seed": 5,
        "enable_prefix_caching": False,
        "hsa_topk": 8,
        "hsa_selection_strategy": "head",
        "hsa_layers": "0-3,7",
        "hsa_window_size": 256,
        "hsa_lmk_id": -1,
        "load_format": "random",
        "disable_cuda_graph": True,
        "kv_cache_dtype": "fp8_e4m3",
    }


def test_a_share_instead_of_fixed_pages(run, llms):
    assert run("generate", "--prompt", "x", "--gpu-memory-utilization", "0.5")[0] == 0
    assert llms[0].options == {"gpu_memory_utilization": 0.5}


def test_a_target_instead_of_a_fixed_chunk(run, llms):
    assert run("generate", "--prompt", "x", "--itl-target-ms", "12.5")[0] == 0
    assert llms[0].options == {"itl_target_ms": 12.5}


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--prompt", "x", "--prompt-token-ids", "1"], "give one of"),
        (["--prompt", "x", "--logprobs", "1"], "--json"),
        (["--chat", "--prompt-token-ids", "1"], "--chat"),
        (["--prompt-token-ids", "1,b"], "1,b"),
        (["--prompt", "x", "--logit-bias", "65"], "ID=VALUE"),
        (["--prompt", "x", "--stop-token-ids", "a"], "--stop-token-ids"),
        (["--prompt", "x", "--selection"], "--json"),
        (["--prompt", "x", "--grammar", "xml=<a>"], "grammar kind is 'xml'"),
        (["--prompt", "x", "--grammar", "regex"], "non-empty"),
        (["--prompt", "x", "--grammar", "ebnf=@nowhere.lark"], "nowhere.lark"),
        (["--prompt", "x", "--temperature", "-1"], "temperature must be in"),
        (["--prompt", "x", "--temperature", "nan"], "temperature must be in"),
        (["--prompt-file", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_bad_input_is_refused_before_loading(run, llms, arguments, word):
    code, out, err = run("generate", *arguments)
    assert (code, out) == (2, "")
    assert word in err
    assert llms == []


def test_missing_options_are_the_models_recommendation(run, llms, monkeypatch):
    monkeypatch.setattr(FakeLLM, "default_params", SamplingParams(top_k=7))
    assert run("generate", "--prompt", "hi", "--top-p", "0.5")[0] == 0
    assert run("generate", "--prompt", "hi", "--top-k", "3")[0] == 0
    assert run("generate", "--prompt", "hi", "--sampling-defaults", "openai")[0] == 0
    params = [llm.calls[-1][1] for llm in llms]
    assert [(p.top_k, p.top_p) for p in params] == [(7, 0.5), (3, 1.0), (0, 1.0)]
    assert run("generate", "--prompt", "hi", "--sampling-defaults", "none")[0] == 2
