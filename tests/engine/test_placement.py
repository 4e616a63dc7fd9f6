"""What each of several engines takes of the machine."""

import os

import pytest
import torch

from cairn.config import HOST_SHARE, EngineOptions
from cairn.engine import build, placement
from cairn.engine.messages import Launch
from cairn.engine.placement import placed, share_threads
from cairn.errors import BadConfig


def of(replica, replicas, **options):
    return placed(Launch("model", EngineOptions(**options), 1, None, replica, replicas))


@pytest.fixture
def gpus(monkeypatch):
    """A machine with four GPUs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


def test_on_a_cpu_memory_and_cores_are_shared(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(build, "free_host_memory", lambda: 1000)
    assert of(0, 1) == EngineOptions()
    assert of(1, 2).kv_cache_memory == int(1000 * HOST_SHARE) // 2
    assert of(1, 2, tensor_parallel_size=2).kv_cache_memory == int(1000 * HOST_SHARE) // 4
    assert of(1, 2, kv_cache_memory="4GiB").kv_cache_memory == "4GiB"
    # Refused by what resolves the options, as for one engine.
    assert of(1, 2, gpu_memory_utilization=0.5).kv_cache_memory is None
    monkeypatch.setattr(placement.os, "sched_getaffinity", lambda pid: range(8))
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    share_threads(3)
    assert os.environ["OMP_NUM_THREADS"] == "5"
    monkeypatch.delenv("OMP_NUM_THREADS")
    share_threads(1)
    assert "OMP_NUM_THREADS" not in os.environ
    share_threads(3)
    assert os.environ["OMP_NUM_THREADS"] == "2"


def test_on_gpus_each_takes_its_own(gpus):
    assert [of(i, 4).device for i in range(4)] == [f"cuda:{i}" for i in range(4)]
    assert [of(i, 2, tensor_parallel_size=2).device for i in range(2)] == ["cuda:0", "cuda:2"]
    assert of(1, 2, device="cpu").device == "cpu"
    with pytest.raises(BadConfig, match="takes 8 GPUs, but there are 4"):
        of(0, 4, tensor_parallel_size=2)
    with pytest.raises(BadConfig, match="'cuda:1'.*CUDA_VISIBLE_DEVICES"):
        of(0, 2, device="cuda:1")
