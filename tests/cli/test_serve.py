import logging
from dataclasses import fields

import pytest

from cairn import __version__
from cairn.cli.serve import serve
from cairn.config import EngineOptions, default_model_path
from cairn.errors import EngineDead
from cairn.server.options import ServerOptions


@pytest.fixture
def started(monkeypatch):
    """What the command would start: (model, engine options, server options)."""
    calls = []

    def run(model, engine, server, say):
        calls.append((model, engine, server))
        say("ready")
        return 0

    monkeypatch.setenv("CAIRN_LOG_FORMAT", "text")
    monkeypatch.delenv("CAIRN_LOG", raising=False)
    monkeypatch.setattr("cairn.server.launch.serve", run)
    monkeypatch.setattr(logging.getLogger("cairn.access"), "level", logging.NOTSET)
    return calls


def test_defaults(run, started):
    assert run("serve") == (0, f"cairn {__version__}\nready\n", "")
    assert started == [(default_model_path(), EngineOptions(), ServerOptions())]
    assert logging.getLogger("cairn.access").isEnabledFor(logging.INFO)


def test_log_level_warning_disables_the_access_log(run, started):
    assert run("--log-level", "warning", "serve")[0] == 0
    assert not logging.getLogger("cairn.access").isEnabledFor(logging.INFO)


SERVER = (
    "--host 0.0.0.0 --port 80 --admin-port 90 --api-key a --api-key b --served-model-name name "
    "--data-parallel-size 2 --load-balance-method round_robin "
    "--allowed-hosts box.lan --allowed-hosts 10.0.0.7 "
    "--max-waiting 1 --max-body-bytes 2000 --max-json-depth 3 --max-headers 4 --max-prompts 5 "
    "--max-stop 6 --max-n 7 --max-logprobs 8 --max-selection-tokens 9 --body-timeout 1.5 "
    "--shutdown-timeout 0 --ready-step-age 2.5 --step-limit 3.5 --tool-parser hermes "
    "--reasoning-parser none --root-path /llm --log-format json --trace otel"
)


def test_every_option(run, started):
    assert run("serve", "folder", *SERVER.split(), "--max-num-seqs", "3")[0] == 0
    ((model, engine, server),) = started
    assert str(model) == "folder"
    assert engine == EngineOptions(max_num_seqs=3)
    assert server == ServerOptions(
        host="0.0.0.0",
        port=80,
        admin_port=90,
        allowed_hosts=("box.lan", "10.0.0.7"),
        api_keys=("a", "b"),
        served_model_name=("name",),
        data_parallel_size=2,
        load_balance_method="round_robin",
        max_waiting=1,
        max_body_bytes=2000,
        max_json_depth=3,
        max_headers=4,
        max_prompts=5,
        max_stop=6,
        max_n=7,
        max_logprobs=8,
        max_selection_tokens=9,
        body_timeout=1.5,
        shutdown_timeout=0.0,
        ready_step_age=2.5,
        step_limit=3.5,
        tool_parser="hermes",
        reasoning_parser="none",
        root_path="/llm",
        log_format="json",
        trace="otel",
    )


def test_names_of_other_engines(run, started):
    vllm = "--max-num-batched-tokens 64 --block-size 32 --enforce-eager --no-enable-prefix-caching"
    more = "--enable-auto-tool-choice --tool-call-parser llama3_json --generation-config vllm"
    assert run("serve", "--model", "folder", *vllm.split(), *more.split())[0] == 0
    sglang = "--context-length 100 --mem-fraction-static 0.5 --max-running-requests 3"
    more = "--disable-radix-cache --random-seed 5 --model-path folder --chunked-prefill-size 64"
    more += " --dp-size 2"
    assert run("serve", *sglang.split(), *more.split())[0] == 0
    (model, engine, server), (other, other_engine, other_server) = started
    assert str(model) == str(other) == "folder"
    assert engine == EngineOptions(
        chunked_prefill_size=64, page_size=32, disable_cuda_graph=True, enable_prefix_caching=False
    )
    assert server == ServerOptions(tool_parser="llama3_json", sampling_defaults="openai")
    assert other_server == ServerOptions(data_parallel_size=2)
    assert other_engine == EngineOptions(
        max_model_len=100,
        gpu_memory_utilization=0.5,
        max_num_seqs=3,
        enable_prefix_caching=False,
        seed=5,
        chunked_prefill_size=64,
    )


def test_every_field_has_an_option():
    assert {field.name for field in fields(ServerOptions)} <= {p.name for p in serve.params}


def test_a_key_from_the_environment_is_one_key(run, started, monkeypatch):
    monkeypatch.setenv("CAIRN_API_KEY", "secret")
    assert run("serve")[0] == 0
    assert started[0][2].api_keys == ("secret",)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--port", "70000"], "port"),
        (["--tool-parser", "none"], "tool_parser"),
        (["--dtype", "int8"], "--dtype"),
        (["--max-n", "0"], "max_n"),
        (["--data-parallel-size", "0"], "data_parallel_size"),
        (["--load-balance-method", "random"], "shortest_queue"),
        (["--prot", "1"], "--port"),
    ],
)
def test_bad_options_are_refused_before_anything_starts(run, started, arguments, word):
    code, out, err = run("serve", *arguments)
    assert (code, out, started) == (2, "", [])
    assert word in err


def test_a_dead_engine_is_the_exit_code(run, started, monkeypatch):
    def die(*_):
        raise EngineDead("the engine process was killed by SIGKILL")

    monkeypatch.setattr("cairn.server.launch.serve", die)
    code, _, err = run("serve")
    assert (code, err) == (1, "error: the engine process was killed by SIGKILL\n")
