"""Counters are 0 before and after every launch."""

import pytest
import torch

from cairn.ops import gpu, grid_barrier
from cairn.ops.gpu import tl, triton

needs_triton = pytest.mark.skipif(not gpu.AVAILABLE, reason="needs Triton")
DEVICE = torch.device("cuda", 0)


@triton.jit
def tally_kernel(counters, out, wanted, APART: tl.constexpr):
    """out [groups, wanted]: order of arrival of each program in its group; the last one resets the
    counter."""
    group = tl.program_id(1)
    place = grid_barrier.arrive(counters + group * APART)
    tl.store(out + group * wanted + tl.program_id(0), place)
    if place == wanted - 1:
        tl.store(counters + group * APART, 0)


@triton.jit
def chain_kernel(counters, out):
    """Each program adds one to the value stored by the previous program."""
    program = tl.program_id(0)
    grid_barrier.await_arrivals(counters, program)
    before = tl.load(out + program, cache_modifier=".cg")
    tl.store(out + program + 1, before + 1)
    grid_barrier.arrive(counters)


def tally(groups, wanted, device):
    out = torch.full((groups, wanted), -1, dtype=torch.int32, device=device)
    counters = grid_barrier.counters(groups, out.device)
    tally_kernel[(wanted, groups)](counters, out, wanted, grid_barrier.STRIDE)
    return out


@needs_triton
def test_every_program_has_a_place_of_its_own(device):
    for groups, wanted in ((1, 1), (3, 7), (600, 2), (3, 7)):
        places = tally(groups, wanted, device).sort(dim=1).values.cpu()
        assert torch.equal(places, torch.arange(wanted, dtype=torch.int32).expand(groups, -1))


@needs_triton
def test_stores_before_an_arrival_are_visible_after_it(device):
    out = torch.zeros(301, dtype=torch.int32, device=device)
    counters = torch.zeros(1, dtype=torch.int32, device=device)
    chain_kernel[(300,)](counters, out)
    assert torch.equal(out.cpu(), torch.arange(301, dtype=torch.int32))


@pytest.mark.gpu
def test_launches_of_a_stream_have_the_same_counters_and_streams_their_own():
    first, other = torch.cuda.Stream(DEVICE), torch.cuda.Stream(DEVICE)
    with torch.cuda.stream(first):
        one, again = grid_barrier.counters(5, DEVICE), grid_barrier.counters(3, DEVICE)
    with torch.cuda.stream(other):
        two = grid_barrier.counters(5, DEVICE)
    assert one.data_ptr() == again.data_ptr() != two.data_ptr()
    assert again.shape == (3, grid_barrier.STRIDE)


@pytest.mark.gpu
def test_a_graph_has_counters_of_its_own_and_can_be_replayed():
    tally(4, 5, DEVICE)
    graphs, results, held = [], [], []
    for _ in range(2):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            results.append([tally(4, 5, DEVICE) for _ in range(3)])
            held.append([grid_barrier.counters(4, DEVICE).data_ptr() for _ in range(2)])
    eager = grid_barrier.counters(4, DEVICE).data_ptr()
    assert held[0][0] == held[0][1] and held[1][0] == held[1][1]
    assert len({held[0][0], held[1][0], eager}) == 3
    for graph, outs in zip(graphs * 2, results * 2, strict=True):
        for out in outs:
            out.fill_(-1)
        graph.replay()
        for out in outs:
            assert torch.equal(out.sort(dim=1).values[0].cpu(), torch.arange(5, dtype=torch.int32))


@pytest.mark.gpu
@pytest.mark.parametrize("missing", ["room", "the graph's number"])
def test_graphs_that_get_none_clear_their_own(missing, monkeypatch):
    if missing == "room":
        store = grid_barrier._Store(max_blocks=0)
        monkeypatch.setattr(grid_barrier, "_store", lambda index: store)
    else:
        monkeypatch.setattr(gpu, "capture_of", lambda device: 0)
    tally(4, 5, DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [tally(4, 5, DEVICE) for _ in range(3)]
    for _ in range(2):
        graph.replay()
        for out in outs:
            assert torch.equal(out.sort(dim=1).values[3].cpu(), torch.arange(5, dtype=torch.int32))
