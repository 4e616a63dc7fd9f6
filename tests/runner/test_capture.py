"""The streams on which steps are captured, and the steps that wait for captures; without a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from cairn.distributed.groups import Group
from cairn.errors import OutOfMemory
from cairn.runner import capture as module
from cairn.runner.capture import capture


class Stream:
    def __init__(self):
        self.awaited = []

    def wait_stream(self, other):
        self.awaited.append(other)


@pytest.fixture
def played(monkeypatch):
    """The main stream, and those on which graphs were captured."""
    main, used = Stream(), []

    def graph(graph, pool, stream, capture_error_mode):
        used.append(stream)
        return nullcontext()

    module._beside.cache_clear()
    for name, stand in {
        "Stream": lambda device: Stream(),
        "current_device": lambda: 0,
        "current_stream": lambda: main,
        "stream": lambda stream: nullcontext(),
        "CUDAGraph": SimpleNamespace,
        "graph": graph,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand)
    yield main, used
    module._beside.cache_clear()


def test_all_graphs_are_captured_on_one_stream_that_waits_and_is_awaited(played):
    main, used = played
    told, output = [], torch.ones(2)

    def run(rehearsal):
        told.append(rehearsal)
        return output

    captured = [capture(run, None) for _ in range(3)]
    assert told == [True, True, False] * 3
    assert used == [used[0]] * 3
    assert main.awaited == [used[0]] * 3 and used[0].awaited == [main] * 3
    assert all(one.output.data_ptr() == output.data_ptr() for one in captured)


def test_work_of_a_failed_rehearsal_is_awaited(played):
    main, used = played

    def run(rehearsal):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        capture(run, None)
    assert len(main.awaited) == 1 and not used
    # Other ranks would wait for this one in the step's sums: the engine ends, and says why.
    with pytest.raises(OutOfMemory, match=r"CUDA out of memory.*--kv-cache-memory"):
        capture(run, None, Group(0, 2))
    assert len(main.awaited) == 2 and not used


@pytest.mark.parametrize("fails", [0, 1])
def test_ranks_capture_a_graph_together_or_not_at_all(played, fails):
    """If only one of two ranks has memory for a graph, neither has the graph."""
    asked = []

    class Pair(Group):
        def least(self, number, device):
            asked.append(number)
            return 0

    def run(rehearsal):
        if fails and not rehearsal:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.ones(2)

    with pytest.raises(torch.OutOfMemoryError, match="CUDA out" if fails else "another rank"):
        capture(run, None, Pair(0, 2))
    assert asked == [1 - fails]
