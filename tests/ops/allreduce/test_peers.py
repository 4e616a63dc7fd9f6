"""Collectives through peer memory: two or four processes with a GPU each."""

from __future__ import annotations

import sys
from datetime import timedelta
from subprocess import Popen

import pytest
import torch
from torch.distributed import HashStore, PrefixStore

from cairn.distributed.rendezvous import hold_store
from cairn.ops.allreduce.peers import _NumberedFromZero

RANK = """
import sys
import torch
from torch.nn.functional import rms_norm
from cairn.distributed.rendezvous import dist, group_of, hold_store, join_store
from cairn.ops.allreduce.peers import PeerSums
from cairn.ops.allreduce.symmetric import sum_of_ranks
rank, ranks, port = map(int, sys.argv[1:])
store = join_store("127.0.0.1", port)
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
if rank == 0:
    # torch numbers a process's exchanges; an earlier group must not disturb this one.
    alone = hold_store()
    backend = group_of(alone, 0, 1, device).backend
    assert PeerSums.of(dist.PrefixStore("sums", alone), backend, 0, 1, device) is not None
group = group_of(store, rank, ranks, device)
peers = PeerSums.of(dist.PrefixStore("sums", store), group.backend, rank, ranks, device)
assert peers is not None
torch.manual_seed(0)

def drawn(*shape, dtype=torch.bfloat16):
    return [torch.randn(shape).to(dtype).to(device) for _ in range(ranks)]

def added(xs, residual, norm):
    total = sum(x.float() for x in xs)
    total = total if norm is None else rms_norm(total, total.shape[1:], norm[0].float(), norm[1])
    return (total + residual.float()).to(residual.dtype)

def same(x):
    first, *others = group.gathered(x)
    assert all(torch.equal(first, other) for other in others)

def words():
    for xs, out, every in zip(given, outs, gathered):
        assert peers.takes(xs[rank]) and peers.takes_gathered(xs[rank])
        peers.sum(xs[rank], out)
        peers.gather(xs[rank], every)
        peers.sum(xs[rank], out, add=True)

def check():
    for xs, out, every in zip(given, outs, gathered):
        assert torch.equal(every, torch.stack(xs))
        once = sum_of_ranks(xs).float()
        assert torch.equal(out, (sum(x.float() for x in xs) + once).to(out.dtype))

float32, float16 = torch.float32, torch.float16
given = [drawn(1, 96), drawn(3, 3, dtype=float32), drawn(7, 130, dtype=float16), drawn(64, 4096)]
outs = [torch.ones_like(xs[0]) for xs in given]
gathered = [torch.zeros_like(torch.stack(xs)) for xs in given]
words()
check()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, capture_error_mode="thread_local"):
    words()
for _ in range(3):
    [out.zero_() for out in (*outs, *gathered)]
    graph.replay()
    check()
for tokens, width in ((1, 4096), (5, 96), (3, 4096), (64, 200), (1, 96)):
    for dtype in (torch.bfloat16, float32):
        xs = drawn(tokens, width, dtype=dtype)
        residual = torch.ones_like(xs[0])
        norm = torch.randn(width).to(residual), 1e-6
        wanted = added(xs, residual, norm)
        assert peers.takes_rows(residual)
        peers.add_normed(xs[rank], residual, *norm)
        torch.testing.assert_close(residual, wanted, rtol=1e-2, atol=1e-2)
        same(residual)
for tokens in (300, 9216, 9217, 14000):
    for normed in (False, True):
        xs = drawn(tokens, 4096)
        residual = torch.ones_like(xs[0])
        norm = (torch.randn(4096).to(residual), 1e-6) if normed else None
        wanted = added(xs, residual, norm)
        assert peers.takes_parts(residual) == (ranks == 2)
        if ranks > 2:
            continue
        peers.add_parts(residual, lambda begin, end: xs[rank][begin:end].clone(), norm)
        torch.testing.assert_close(residual, wanted, rtol=1e-2, atol=2e-2)
        same(residual)
torch.cuda.synchronize()
print("right", flush=True)
"""


def test_processes_with_different_numbers_of_exchanges_meet() -> None:
    """torch's rendezvous numbers its keys; one process has made two exchanges before."""
    shared = HashStore()
    first, second = (_NumberedFromZero(shared) for _ in range(2))
    # Calls go through C++ as in torch's own use.
    stores = [(PrefixStore("sums", first), 2), (PrefixStore("sums", second), 0)]
    for exchange in range(2):
        for rank, (store, made) in enumerate(stores):
            store.set(f"CUDASymmetricMemory/{made + exchange}/{rank}", f"{exchange} of {rank}")
        for rank, (store, made) in enumerate(stores):
            key = f"CUDASymmetricMemory/{made + exchange}/{1 - rank}"
            store.wait([key], timedelta(seconds=1))
            assert store.get(key) == f"{exchange} of {1 - rank}".encode()


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_have_the_same_sums(ranks: int) -> None:
    """All forms, in turn, some in a graph: equal to the definition, and bitwise equal on all
    ranks."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    store = hold_store()
    command = [sys.executable, "-c", RANK]
    processes = [Popen([*command, *map(str, (i, ranks, store.port))]) for i in range(ranks)]
    try:
        assert [one.wait(timeout=120) for one in processes] == [0] * ranks
    finally:
        for one in processes:
            one.kill()
