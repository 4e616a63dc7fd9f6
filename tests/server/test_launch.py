"""Servers that cannot start: one message with cause and hint, an exit code, without delay."""

import json
import pickle
import shutil
import signal
import socket
from pathlib import Path

import httpx
import pytest

from cairn.config import default_model_path
from cairn.engine.tokenizer import load_tokenizer
from cairn.models.registry import load_spec
from cairn.server.launch import LOOPBACK
from tests.server.running import Running, fails

SOON = 30.0
"""Seconds; an idle machine needs less than five."""


def refused(words, *arguments, code=2):
    """The server ends with one line on stderr that contains these words; returns the line."""
    found, told, seconds = fails(*arguments)
    lines = told.splitlines()
    assert found == code, told
    assert len(lines) == 1 and lines[0].startswith("error: "), told
    for word in words:
        assert word in lines[0], told
    assert seconds < SOON
    return lines[0]


@pytest.fixture
def taken():
    """A port on which another process listens."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        yield listener.getsockname()[1]


def test_a_busy_port(taken):
    refused([str(taken), "in use", "--port"], "--port", str(taken))


def test_a_busy_admin_port(taken):
    arguments = ("--port", "0", "--admin-port", str(taken))
    refused([str(taken), "in use", "--admin-port"], *arguments)


def test_a_host_that_is_not_ours():
    refused(["192.0.2.1", "--host"], "--host", "192.0.2.1", "--port", "0")
    refused(["no.such.host.invalid"], "--host", "no.such.host.invalid", "--port", "0")


def test_no_such_folder(tmp_path):
    refused(["nothing", "not a folder"], str(tmp_path / "nothing"), "--port", "0")


def test_an_impossible_option():
    refused(["max_n", "-3"], "--max-n", "-3")


def test_no_memory():
    arguments = ("--port", "0", "--kv-cache-memory", "1MiB", "--max-model-len", "100000")
    refused(["needs", "--kv-cache-memory"], *arguments, code=1)


@pytest.fixture
def model(tmp_path):
    """A copy of the embedded model, to be corrupted."""
    return Path(shutil.copytree(default_model_path(), tmp_path / "model"))


def test_a_missing_shard(model):
    shard = "model-00001-of-00002.safetensors"
    (model / "model.safetensors").rename(model / shard)
    index = {"metadata": {}, "weight_map": {"a": shard, "b": "model-00002-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(["model-00002-of-00002.safetensors"], str(model), "--port", "0")


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (self.mark,))


def booby_trap(model, mark):
    """Code that transformers would import, in every file of a folder that can name it."""
    (model / "evil.py").write_text(f"open({str(mark)!r}, 'w')\n")
    names = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "auto_map": names}))
    config = json.loads((model / "tokenizer_config.json").read_text())
    config["auto_map"] = {"AutoTokenizer": ["evil.Tokenizer", None]}
    config["tokenizer_class"] = "Tokenizer"
    (model / "tokenizer_config.json").write_text(json.dumps(config))


def test_a_model_that_needs_its_own_code_is_refused_and_nothing_runs(model, tmp_path):
    mark = tmp_path / "ran"
    booby_trap(model, mark)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": "evil"}))
    refused(["evil", "unknown"], str(model), "--port", "0")
    assert not mark.exists()


def test_code_beside_a_known_model_is_not_run(model, tmp_path):
    mark = tmp_path / "ran"
    booby_trap(model, mark)
    assert load_spec(model).landmarks
    assert load_tokenizer(model).decode(load_tokenizer(model).encode("hello")) == "hello"
    assert not mark.exists()


def test_pickled_weights_are_refused_and_not_opened(model, tmp_path):
    mark = tmp_path / "ran"
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(mark)))
    refused(["pytorch_model.bin", "pickled", "safetensors"], str(model), "--port", "0")
    assert not mark.exists()


@pytest.fixture
def started(tmp_path):
    """Starts servers whose models need not be there, and ends them."""
    servers = []

    def start(*arguments):
        servers.append(Running(tmp_path, *arguments))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def ended(server):
    """What a server says that is told to end while its model loads."""
    server.signal(signal.SIGTERM)
    assert server.wait_end() == 0
    told = server.err.read_text()
    assert "error" not in told
    return told


@pytest.mark.parametrize(
    ("more", "warned"), [((), True), (("--api-key", "secret"), False)], ids=["open", "with a key"]
)
def test_a_port_that_is_open_to_all_is_warned_of(started, more, warned):
    told = ended(started("--host", "0.0.0.0", *more))
    assert ("WARNING" in told and "no API key" in told and "0.0.0.0" in told) == warned, told


def test_a_port_of_this_machine_refuses_foreign_hosts_and_is_not_warned_of(started):
    server = started("--host", "localhost")
    for url in (f"{server.url}/v1/models", f"{server.admin}/admin/cache"):
        assert httpx.get(url, headers={"Host": "evil.example"}).status_code == 403
        assert httpx.get(url).status_code != 403
    assert "WARNING" not in ended(server)
