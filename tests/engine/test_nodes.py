"""Ranks on several hosts, here processes of one machine: equal tokens, and errors."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import psutil
import pytest

from cairn.config import EngineOptions
from cairn.engine.build import build
from cairn.engine.nodes import VERSIONS, Challenge, Hello, Meeting, Welcome, join
from cairn.engine.transfer.wire import receive_frame, send_frame
from cairn.errors import BadConfig, EngineDead
from cairn.specs.nodes import Nodes, resolve_nodes
from tests.engine import children, ranked
from tests.engine.harness import greedy, run, text
from tests.engine.test_families import FAMILIES

HERE = Nodes(2, 0, "127.0.0.1", 1, 20.0, b"secret")
MODEL = FAMILIES["landmarks"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


@contextmanager
def node_one(port: int, *more: str) -> Iterator[subprocess.Popen]:
    """`cairn serve` as node 1."""
    where = ["--nnodes", "2", "--node-rank", "1", "--dist-init-addr", f"127.0.0.1:{port}"]
    command = [sys.executable, "-m", "cairn", "serve", str(MODEL), "-tp", "2", "--device", "cpu"]
    process = subprocess.Popen([*command, *where, *more])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def engine(port: int, **options):
    given = {"dtype": "float32", "device": "cpu", "kv_cache_memory": "16MiB", "max_num_seqs": 4}
    address = f"127.0.0.1:{port}"
    more = {"tensor_parallel_size": 2, "nnodes": 2, "dist_init_addr": address, **options}
    return build(MODEL, EngineOptions(**given, **more))


@pytest.mark.slow
def test_two_nodes_give_what_one_gives() -> None:
    port, health = free_port(), free_port()
    with node_one(port, "--port", str(health)) as process:
        two = engine(port).core
        assert urllib.request.urlopen(f"http://127.0.0.1:{health}/health", timeout=5).status == 200
        one, prompts = ranked.engine(MODEL, 1), [text(1, 70), text(2, 3)]
        live = [two.add(f"r{i}", prompt, greedy(4)) for i, prompt in enumerate(prompts)]
        while two.has_work:
            two.step()
        for mine, its in zip(live, run(one, prompts, greedy(4)), strict=True):
            assert mine.stream.output.token_ids == its.tokens
        # Kill a rank of the other node between two steps: it is named, and all processes end.
        [rank] = psutil.Process(process.pid).children()
        two.add("again", prompts[0], greedy(50))
        two.step()
        began = time.monotonic()
        rank.kill()
        rank.wait()
        with pytest.raises(EngineDead, match=r"rank 1 \(cpu\) was killed by SIGKILL"):
            while two.has_work:
                two.step()
        assert time.monotonic() - began < 2
        assert process.wait(10) == 1


@contextmanager
def met(nodes: Nodes) -> Iterator[tuple[Nodes, list]]:
    """A rendezvous in a thread: its address, and its result."""
    listener, found = socket.create_server((nodes.host, 0)), []
    there = replace(nodes, number=1, port=listener.getsockname()[1])
    meeting = Meeting(nodes, listener.detach())

    def accept() -> None:
        try:
            found.extend(meeting.accept(7, 2, "cpu", lambda: "rank 0 at start"))
        except EngineDead as error:
            found.append(error)

    thread = threading.Thread(target=accept)
    thread.start()
    yield there, found
    thread.join(20)


def test_refused_nodes_get_the_reason() -> None:
    with met(HERE) as (there, found):
        for other, reason in (
            (replace(there, secret=b"another"), "the secrets differ"),
            (replace(there, count=3), "node 1 of 3, here are 2"),
        ):
            with pytest.raises(EngineDead, match=f"refuses this node.*{reason}"):
                join(other)
        with socket.create_connection((there.host, there.port)) as older:
            nonce = receive_frame(older, Challenge, b"").nonce
            send_frame(older, Hello(nonce, "an older one", 1, 2), there.secret)
            refused = receive_frame(older, Welcome, b"").refused
            assert refused == f"node 0 runs {VERSIONS}, node 1 an older one"
        connection, welcome = join(there)
        assert welcome == Welcome(7, 2, "cpu")
    [link] = found
    # It closes its connection and ends.
    connection.close()
    deadline = time.monotonic() + 5
    while link.reason is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "node 1 ended its connection" in str(link.reason)
    link.close()


def test_an_absent_node_and_a_taken_port_are_named() -> None:
    with met(replace(HERE, seconds=0.3)) as (_, found):
        pass
    missing = "node 1 has not reported in 0 s; the others: rank 0 at start.*--node-rank 1"
    assert re.search(missing, str(found[0]))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BadConfig, match=rf"port {port} .*--dist-init-addr"):
            engine(port)
    with pytest.raises(EngineDead, match="node 0 cannot be reached"):
        join(replace(HERE, number=1, port=free_port(), seconds=0.2))


def test_options_of_nodes() -> None:
    def resolved(ranks: int = 2, environment=None, **options) -> Nodes | None:
        return resolve_nodes(EngineOptions(**options), ranks, environment or {})

    assert resolved() is None
    found = resolved(nnodes=2, node_rank=1, master_addr="127.0.0.1")
    assert found is not None and (found.number, found.port) == (1, 29500)
    started = {
        "TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "5",
    }  # fmt: skip
    found = resolved(4, started)
    assert found is not None and (found.count, found.number, found.local) == (4, 3, (1, 2))
    for message, ranks, options in (
        ("--dist-init-addr HOST:PORT", 2, {"nnodes": 2}),
        ("node_rank is 2, but nnodes is 2. Use 0 to 1", 2, {"nnodes": 2, "node_rank": 2}),
        ("3, which 2 nodes cannot share", 3, {"nnodes": 2}),
        ("Set CAIRN_CLUSTER_SECRET", 2, {"nnodes": 2, "dist_init_addr": "192.0.2.1:5"}),
        ("torchrun started 4 .*--tensor-parallel-size 4", 2, {"environment": started}),
    ):
        with pytest.raises(BadConfig, match=message):
            resolved(ranks, **options)
    with pytest.raises(BadConfig, match="node_rank is 1, but node 0 has the engine"):
        engine(5, node_rank=1)


@pytest.mark.slow
def test_torchrun_starts_a_server_of_two_ranks(tmp_path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m"]
    command += ["cairn", "serve", str(children.MODEL), "-tp", "2", "--device", "cpu"]
    command += ["--port", str(port), "--admin-port", "0", "--kv-cache-memory", "16MiB"]
    log = (tmp_path / "log").open("wb")
    process = subprocess.Popen(command, env=os.environ, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            assert process.poll() is None, (tmp_path / "log").read_text()
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5)
                break
            except OSError:
                time.sleep(0.2)
        asked = {"model": children.MODEL.name, "prompt": [1, 2, 3], "max_tokens": 3}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions",
            json.dumps(asked).encode(),
            {"Content-Type": "application/json"},
        )
        answer = json.load(urllib.request.urlopen(request, timeout=30))
        assert answer["usage"]["completion_tokens"] == 3
    finally:
        process.terminate()
        assert process.wait(60) is not None
