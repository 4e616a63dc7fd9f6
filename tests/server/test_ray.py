"""Plans for Ray Serve and, if Ray is installed, a cluster on this machine that serves one."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time

import httpx
import psutil
import pytest

from cairn.errors import BadConfig, BadRequest
from cairn.llm import LLM
from cairn.server.ray import plan_of
from cairn.server.remote_prefill import RemotePrefillMiddleware, run_prefill
from cairn.types import SamplingParams
from tests.engine.children import MODEL
from tests.server.running import PROGRAM

PLAN = f"""
model = "{MODEL}"
replicas = 2

[engine]
device = "cpu"
dtype = "float32"
kv_cache_memory = "16MiB"

[server]
port = 8765
served_model_name = "tiny"
allowed_hosts = ["127.0.0.1"]

[resources]
num_cpus = 0.5
"""
TWO_NODES = 'model = "m"\n[engine]\nnnodes = 2\ntensor_parallel_size = 4\n'
URL = "http://127.0.0.1:8765"
START_SECONDS = 400


def test_a_plan_is_read():
    plan = plan_of(PLAN)
    engine, server = plan.options()
    assert (plan.replicas, plan.resources) == (2, {"num_cpus": 0.5})
    assert (engine.device, server.served_model_names) == ("cpu", ("tiny",))
    assert server.allowed_hosts == ("127.0.0.1",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model", "is no TOML"),
        ("replicas = 2", "names no model"),
        ('model = "m"\nreplica = 2', "no option 'replica'. Did you mean 'replicas'"),
        ('model = "m"\nreplicas = 0', "replicas must be an integer >= 1, not 0"),
        ('model = "m"\nengine = 3', r"Write a table \[engine\]"),
        ('model = "m"\n[engine]\ndevice = "tpu"', "device is 'tpu'"),
        ('model = "m"\n[server]\nmax_m = 1', "no option 'max_m'. Did you mean 'max_n'"),
        ('model = "m"\n[engine]\nnnodes = 2', "is 1, which 2 nodes cannot share evenly"),
        ('model = "m"\n[engine]\ndist_init_addr = "a:1"', "'a:1', but Ray places nodes. Leave out"),
        (TWO_NODES + "[server]\ndata_parallel_size = 2", "engines of one server are on one node"),
        (TWO_NODES + "[prefill]\nreplicas = 1", "pages of an engine on several nodes"),
        (TWO_NODES + "[resources]\nlabel_selector = {a = 'b'}", "has label_selector"),
        (TWO_NODES + "[resources]\nnum_cpus = 0", "takes nothing of a node"),
        (TWO_NODES + "[resources]\nnum_gpus = 1", "has 2 ranks on a node, but .* num_gpus = 1"),
        (
            'model = "m"\n[engine]\ntensor_parallel_size = 2\n[resources]\nnum_gpus = 1',
            "has 2 ranks on a node, but .* num_gpus = 1",
        ),
        ('model = "m"\n[prefill]\nreplica = 1', r"\[prefill\] has 'replica'"),
        ('model = "m"\n[prefill.engine]\ndevice = "tpu"', "device is 'tpu'"),
    ],
)
def test_invalid_plans_are_refused(text, message):
    with pytest.raises((BadConfig, BadRequest), match=message):
        plan_of(text)


PREFILL = """
[prefill]
replicas = 1
engine = { kv_host_memory = "32MiB" }
resources = { num_cpus = 0.25 }
"""


def test_a_node_of_a_replica_is_a_bundle():
    resources = "[resources]\nnum_gpus = 2\nresources = {fast = 1}\naccelerator_type = 'T4'"
    bundle = {"CPU": 1, "GPU": 2, "fast": 1, "accelerator_type:T4": 0.001}
    assert plan_of(TWO_NODES + resources).bundle == bundle


def test_prompts_have_servers_of_their_own():
    plan = plan_of(PLAN + PREFILL)
    first, second = plan.of_prefill(), plan.of_decode()
    assert (first.replicas, first.resources) == (1, {"num_cpus": 0.25})
    engine, _ = first.options()
    assert (engine.disaggregation_mode, engine.disaggregation_bootstrap_port) == ("prefill", 0)
    assert (engine.kv_host_memory, engine.dtype) == ("32MiB", "float32")
    assert second.options()[0].disaggregation_mode == "decode" and second.replicas == 2


@pytest.mark.parametrize("failing", [False, True])
def test_a_prompt_is_computed_elsewhere_first(failing):
    """Through the server's application; on failure the request continues unchanged."""
    asked: list[dict] = []

    async def answer(scope, receive, send):
        body = json.loads((await receive())["body"])
        asked.append(body)
        given = {"kv_transfer_params": {"remote_port": 5}} if "messages" in body else {}
        status = 500 if failing and len(asked) == 1 else 200
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(given).encode()})

    async def prompt(path, headers, body):
        return await run_prefill(answer, path, headers, body)

    transport = httpx.ASGITransport(RemotePrefillMiddleware(answer, prompt))

    async def post(path, **body):
        async with httpx.AsyncClient(transport=transport, base_url="http://a") as client:
            return await client.post(path, json=body)

    body = {"messages": [], "max_completion_tokens": 9, "stream": True, "n": 3}
    asyncio.run(post("/v1/chat/completions", **body))
    first, second = asked
    assert (first["max_tokens"], first["stream"]) == (1, False)
    assert first["kv_transfer_params"] == {"do_remote_decode": True}
    assert not {"max_completion_tokens", "n"} & first.keys()
    given = {} if failing else {"kv_transfer_params": {"remote_port": 5}}
    assert second == body | given
    asyncio.run(post("/v1/embeddings", input="a"))
    assert asked[2:] == [{"input": "a"}]
    asyncio.run(post("/v1/responses", input="a", max_output_tokens=9))
    assert asked[3]["max_output_tokens"] == 1 and "max_tokens" not in asked[3]


def engines(module="cairn.engine.process") -> set[int]:
    """Processes of engines, or of ranks on other nodes, whose parents are actors of Ray."""
    found = set()
    for process in psutil.process_iter(["cmdline"]):
        if module in (process.info["cmdline"] or ()):
            parent = process.parent()
            if parent is not None and "ray::" in " ".join(parent.cmdline()):
                found.add(process.pid)
    return found


def ranks() -> set[int]:
    return engines("cairn.engine.rank")


def wait_for(condition):
    deadline = time.monotonic() + START_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    return found


def wait_for_end(*processes):
    wait_for(lambda: not any(map(psutil.pid_exists, processes)))


def complete(**fields):
    body = {"model": "tiny", "prompt": "The stones", "max_tokens": 8, "temperature": 0, **fields}
    try:
        return httpx.post(f"{URL}/v1/completions", json=body, timeout=60)
    except httpx.TransportError:
        return None


def served():
    answer = complete()
    return answer if answer is not None and answer.status_code == 200 else None


@pytest.mark.slow
@pytest.mark.timeout(2 * START_SECONDS)
def test_replicas_on_ray_serve_and_come_back(tmp_path):
    pytest.importorskip("ray.serve")
    (file := tmp_path / "plan.toml").write_text(PLAN)
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "ray", "serve", str(file)],
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
    )
    try:
        wait_for(lambda: len(engines()) == 2 and served())
        first = served().json()["choices"][0]["text"]
        stream = complete(stream=True)
        assert stream.text.rstrip().endswith("data: [DONE]")
        lost, kept = sorted(engines())
        os.kill(lost, signal.SIGKILL)
        wait_for(lambda: len(engines()) == 2 and lost not in engines())
        assert kept in engines()
        # Until Ray's proxy is notified, it may still use the replica that has ended.
        answers = wait_for(lambda: all(found := [served() for _ in range(6)]) and found)
        assert {answer.json()["choices"][0]["text"] for answer in answers} == {first}
    finally:
        process.terminate()
        ended = process.wait(120)
    assert ended == 130
    wait_for(lambda: not engines())


@pytest.mark.slow
@pytest.mark.timeout(2 * START_SECONDS)
def test_prefill_and_decode_on_ray(tmp_path):
    pytest.importorskip("ray.serve")
    memory = 'kv_cache_memory = "16MiB"\nkv_host_memory = "16MiB"'
    plan = PLAN.replace('kv_cache_memory = "16MiB"', memory).replace("replicas = 2", "replicas = 1")
    (file := tmp_path / "plan.toml").write_text(plan + "\n[prefill]\nreplicas = 1\n")
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "ray", "serve", str(file)],
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
    )
    try:
        wait_for(lambda: len(engines()) == 2 and served())
        prompt = "The river goes down to the sea, and the sea goes up to the sky again. " * 4
        answer = complete(prompt=prompt).json()
        # The decoding engine has not seen it before.
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 64
    finally:
        process.terminate()
        ended = process.wait(120)
    assert ended == 130


@pytest.mark.slow
@pytest.mark.timeout(4 * START_SECONDS)
def test_a_replica_on_two_nodes(tmp_path):
    """On a cluster of two nodes, which are processes of this machine with addresses of their own.
    Its tokens are those of one rank; it comes back after the end of a rank, an actor or a node."""
    pytest.importorskip("ray.serve")
    from ray.cluster_utils import Cluster

    other = {"num_cpus": 1, "node_ip_address": "127.0.0.2"}
    cluster = Cluster(True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    node = cluster.add_node(**other)
    plan = PLAN.replace("replicas = 2", "replicas = 1").replace("num_cpus = 0.5", "num_cpus = 1")
    plan = plan.replace("[engine]", "[engine]\ntensor_parallel_size = 2\nnnodes = 2")
    (file := tmp_path / "plan.toml").write_text(plan)
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "ray", "serve", str(file)],
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": cluster.address},
    )
    try:
        alone = LLM(MODEL, device="cpu", dtype="float32", kv_cache_memory="16MiB")
        [output] = alone.generate("The stones", SamplingParams(max_tokens=8, temperature=0))
        for end in ("rank", "actor", "node", None):
            answer = wait_for(served).json()["choices"][0]
            assert answer["text"] == output.outputs[0].text
            [engine], [rank] = engines(), ranks()
            if end == "rank":
                os.kill(rank, signal.SIGKILL)
            elif end == "actor":
                psutil.Process(rank).parent().kill()
            elif end == "node":
                cluster.remove_node(node, allow_graceful=False)
                wait_for(lambda: not engines() and not ranks())
                cluster.add_node(**other)
            if end:
                wait_for_end(engine, rank)
        process.terminate()
        assert process.wait(120) == 130
        wait_for(lambda: not engines() and not ranks())
    finally:
        process.kill()
        process.wait()
        cluster.shutdown()
