"""Sums through memory that ranks share: two ranks as two streams of one GPU."""

from __future__ import annotations

import pytest
import torch

from cairn.ops.allreduce import peers
from cairn.ops.allreduce.peers import PeerSums
from cairn.ops.allreduce.symmetric import sum_of_ranks

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")


def two_ranks() -> list[PeerSums]:
    memory = [torch.zeros(peers.memory_bytes(2), dtype=torch.uint8, device=DEVICE) for _ in "01"]
    at = [tensor.data_ptr() for tensor in memory]
    return [PeerSums(rank, 2, memory[rank], at, memory[1 - rank]) for rank in (0, 1)]


def test_words() -> None:
    """Every rank gets the same bits, whatever was exchanged before; in graphs too."""
    ranks, streams = two_ranks(), [torch.cuda.Stream(), torch.cuda.Stream()]
    shapes = [((1, 96), torch.bfloat16), ((3, 3), torch.float32), ((7, 130), torch.float16)]
    given = [
        [torch.randn(shape, device=DEVICE).to(dtype) for _ in ranks] for shape, dtype in shapes
    ]
    outs = [[torch.ones_like(xs[0]) for _ in ranks] for xs in given]

    def exchange(rank: int) -> None:
        for xs, out in zip(given, outs, strict=True):
            assert ranks[rank].takes(xs[rank])
            ranks[rank].sum(xs[rank], out[rank])
            ranks[rank].sum(xs[rank], out[rank], add=True)

    def check() -> None:
        torch.cuda.synchronize()
        for xs, out in zip(given, outs, strict=True):
            assert torch.equal(out[0], out[1])
            once = sum_of_ranks(xs).float()
            wanted = sum(x.float() for x in xs) + once
            assert torch.equal(out[0], wanted.to(out[0].dtype))

    torch.cuda.synchronize()
    graphs = []
    for rank, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            exchange(rank)
    check()
    for rank, stream in enumerate(streams):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            exchange(rank)
        graphs.append(graph)
    for _ in range(3):
        for out in outs:
            out[0].zero_()
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        check()


def test_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """More parts than slots, of which the last is smaller; several sums one behind the other."""
    monkeypatch.setattr(peers, "PART_BYTES", 8 * 256 * 2)
    ranks, streams = two_ranks(), [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    xs = [torch.randn(50, 256, device=DEVICE).bfloat16() for _ in ranks]
    streamed = torch.randn(50, 256, device=DEVICE).bfloat16()
    wanted, found = streamed, [streamed.clone(), streamed.clone()]
    for _ in range(3):
        wanted = (xs[0].float() + xs[1].float() + wanted.float()).bfloat16()
    torch.cuda.synchronize()
    for rank, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            for _ in range(3):
                ranks[rank].add_parts(found[rank], lambda a, b, x=xs[rank]: x[a:b].clone())
    torch.cuda.synchronize()
    for each in found:
        assert torch.equal(each, wanted)
