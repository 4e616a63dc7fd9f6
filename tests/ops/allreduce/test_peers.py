"""Sums through memory that ranks share: two ranks as two streams of one GPU."""

from __future__ import annotations

import pytest
import torch

from cairn import ops
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
    norms = [None, (torch.randn(256, device=DEVICE).bfloat16(), 1e-6), None]
    for norm in norms:
        wanted = added(xs, wanted, norm)
    torch.cuda.synchronize()
    for rank, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            for norm in norms:
                ranks[rank].add_parts(found[rank], lambda a, b, x=xs[rank]: x[a:b].clone(), norm)
    torch.cuda.synchronize()
    assert torch.equal(*found)
    assert torch.allclose(found[0].float(), wanted.float(), rtol=1e-2, atol=1e-2)


def added(xs, residual, norm):
    total = xs[0].float() + xs[1].float()
    if norm is not None:
        total = torch.nn.functional.rms_norm(total, total.shape[1:], norm[0].float(), norm[1])
    return (total + residual.float()).to(residual.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_normed_on_the_way(dtype: torch.dtype) -> None:
    """Rows of two widths in turn."""
    ranks, streams = two_ranks(), [torch.cuda.Stream(), torch.cuda.Stream()]
    cases = []
    for tokens, width in ((1, 4096), (5, 96), (3, 4096), (64, 200), (1, 96)):
        xs = [torch.randn(tokens, width, device=DEVICE).to(dtype) for _ in ranks]
        norm = torch.randn(width, device=DEVICE).to(dtype), 1e-6
        cases.append((xs, [torch.ones_like(xs[0]) for _ in ranks], norm))
        assert ranks[0].takes_rows(xs[0])
    torch.cuda.synchronize()
    for rank, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            for xs, found, norm in cases:
                ranks[rank].add_normed(xs[rank], found[rank], *norm)
    torch.cuda.synchronize()
    for xs, found, norm in cases:
        assert torch.equal(*found)
        wanted = added(xs, torch.ones_like(xs[0]), norm)
        assert torch.allclose(found[0].float(), wanted.float(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("added", [False, True])
def test_heads_are_normed_together(added: bool) -> None:
    """Two ranks with two query heads and a KV head each are one with four and two, k's and z's."""
    ranks, streams, dim = two_ranks(), [torch.cuda.Stream(), torch.cuda.Stream()], 16
    sizes = {"q": 4, "k": 2, "z": 4, "v": 2}
    whole = {name: torch.randn(3, n, dim, device=DEVICE) for name, n in sizes.items()}
    weight = torch.randn(10, dim, device=DEVICE)
    angles, location = torch.randn(3, dim, device=DEVICE), torch.tensor([5, 0, 2], device=DEVICE)

    def given(rank: int | None) -> tuple:
        q, k, z, v = (x if rank is None else x.chunk(2, 1)[rank] for x in whole.values())
        spans = weight.split((4, 2, 4))
        norms = torch.cat([x if rank is None else x.chunk(2)[rank] for x in spans])
        heads = (q, k, v) if added else (q, k, z, v)
        cache = [torch.zeros(2, k.shape[1], 4, dim, device=DEVICE) for _ in "kv"]
        more = z.flatten(1).contiguous() if added else None
        joint = torch.cat([x.flatten(1) for x in heads], 1)
        return joint, more, norms.contiguous(), angles, *cache, location, q.shape[1], 1e-6

    one = given(None)
    wanted = (*ops.heads_into_cache(*one, True), *one[4:6])
    torch.cuda.synchronize()
    found = []
    for rank, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            mine = given(rank)
            for _ in range(3):
                made = ranks[rank].heads_into_cache(*mine)
            assert made is not None
            found.append((*made, *mine[4:6]))
    torch.cuda.synchronize()
    for want, *parts in zip(wanted, *found, strict=True):
        assert torch.allclose(torch.cat(parts, 1), want, rtol=1e-5, atol=1e-5)
