"""The share of the machine that each of several engines gets."""

import os

import pytest
import torch

from cairn.config import HOST_SHARE, EngineOptions
from cairn.engine import build, placement
from cairn.engine.messages import Launch
from cairn.engine.placement import GPUS, THREADS, placed
from cairn.errors import BadConfig


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Eight cores; changes of the environment are undone."""
    monkeypatch.setattr(placement.os, "sched_getaffinity", lambda pid: range(8))
    monkeypatch.setattr(build, "free_host_memory", lambda: 1000)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for name in (THREADS, GPUS):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def gpus(monkeypatch):
    """Four GPUs, of which torch sees those that the environment names."""

    def count():
        return len(os.environ[GPUS].split(",")) if GPUS in os.environ else 4

    monkeypatch.setattr(torch.cuda, "device_count", count)


def of(replica, replicas, **options):
    return placed(Launch("model", EngineOptions(**options), 1, None, replica, replicas))


def test_one_engine_takes_what_there_is(gpus):
    assert of(0, 1) == EngineOptions()
    assert THREADS not in os.environ
    # Its ranks share the cores.
    of(0, 1, tensor_parallel_size=4)
    assert os.environ[THREADS] == "2" and GPUS not in os.environ


def test_on_a_cpu_memory_and_cores_are_shared(monkeypatch):
    assert of(1, 2).kv_cache_memory == int(1000 * HOST_SHARE) // 2
    assert os.environ[THREADS] == "4"
    monkeypatch.delenv(THREADS)
    assert of(1, 2, tensor_parallel_size=2).kv_cache_memory == int(1000 * HOST_SHARE) // 4
    assert os.environ[THREADS] == "2"
    assert of(1, 4, kv_cache_memory="4GiB").kv_cache_memory == "4GiB"
    assert os.environ[THREADS] == "2", "what is there already is kept"
    # `resolve` refuses it, as for one engine.
    assert of(1, 2, gpu_memory_utilization=0.5).kv_cache_memory is None


def test_replicas_that_keep_pages_for_others_listen_at_ports_of_their_own(monkeypatch):
    for mode, given, port in (("prefill", 7000, 7002), ("prefill", 0, 0), ("decode", 7000, 7000)):
        asked = {"disaggregation_mode": mode, "disaggregation_bootstrap_port": given}
        assert of(2, 3, **asked).disaggregation_bootstrap_port == port


@pytest.mark.parametrize(
    ("named", "replicas", "ranks", "taken"),
    [
        (None, 4, 1, ["0", "1", "2", "3"]),
        (None, 2, 2, ["0,1", "2,3"]),
        ("3,1", 2, 1, ["3", "1"]),
    ],
)
def test_on_gpus_each_takes_its_own(gpus, monkeypatch, named, replicas, ranks, taken):
    for replica, names in enumerate(taken):
        monkeypatch.delenv(GPUS, raising=False)
        if named is not None:
            monkeypatch.setenv(GPUS, named)
        options = of(replica, replicas, tensor_parallel_size=ranks)
        assert options == EngineOptions(tensor_parallel_size=ranks)
        assert os.environ[GPUS] == names


def test_impossible_shares_of_gpus_are_refused(gpus, monkeypatch):
    assert of(1, 2, device="cpu").kv_cache_memory is not None
    with pytest.raises(BadConfig, match="takes 8 GPUs, but there are 4"):
        of(0, 4, tensor_parallel_size=2)
    with pytest.raises(BadConfig, match="'cuda:1'.*CUDA_VISIBLE_DEVICES"):
        of(0, 2, device="cuda:1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(BadConfig, match="replica 1 cannot be kept to GPUs 1"):
        of(1, 2)
