"""CUDA graphs without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from cairn.distributed.groups import Group
from cairn.runner import graphs, prefill_graphs
from cairn.runner.capture import Captured


@pytest.fixture
def no_gpu(monkeypatch):
    """The CPU acts as a GPU, and replaying a graph calls its function again."""
    make = torch.zeros

    def zeros(*shape, pin_memory=False, **options):
        return make(*shape, **options)

    monkeypatch.setattr(torch, "zeros", zeros)
    idle = SimpleNamespace(record=lambda stream: None, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: idle)
    stream = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)

    def capture(run: Callable[[bool], torch.Tensor], pool: None, group: Group) -> Captured:
        output = run(True)
        again = SimpleNamespace(replay=lambda: output.copy_(run(False)))
        return Captured(again, output)

    monkeypatch.setattr(graphs, "capture", capture)
    monkeypatch.setattr(prefill_graphs, "capture", capture)
