"""All-reduce: the definition, a group of two processes, and refused arguments."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen

import pytest
import torch

from cairn import ops
from cairn.errors import BadArgument
from cairn.ops.allreduce.quick_reduce import rounded, sum_of_rounded
from cairn.ops.allreduce.symmetric import sum_of_ranks

dist = pytest.importorskip("torch.distributed")


def test_the_sum_is_float32_in_the_order_of_the_ranks() -> None:
    given = [torch.tensor([x]).bfloat16() for x in (256.0, 1.0, 1.0)]
    assert sum_of_ranks(given).item() == 258.0
    large = [torch.tensor([x]) for x in (1e8, 1.0, -1e8)]
    assert sum_of_ranks(large).item() == 0.0
    assert sum_of_ranks(large[::2] + large[1:2]).item() == 1.0


@pytest.mark.parametrize("profile, most", [(1, 127), (2, 31), (3, 7)])
def test_quick_reduce_rounds_blocks_to_integers(profile: int, most: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 25)
    sent = rounded(x, profile)
    blocks = torch.nn.functional.pad((sent - x).flatten(), (0, 21)).view(-1, 32)
    scale = torch.nn.functional.pad(x.flatten(), (0, 21)).view(-1, 32).abs().amax(1) / most
    assert bool((blocks.abs().amax(1) <= 0.5001 * scale).all())
    assert torch.equal(sum_of_rounded([x, x], profile), 2 * sent)
    assert torch.equal(rounded(x, 0), x)
    assert not rounded(torch.zeros(40), profile).any()


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """This process alone."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_handles(group: None) -> None:
    handle = ops.init_custom_ar(None, None, 0, True)
    x, out = torch.randn(5, 3), torch.empty(5, 3)
    ops.all_reduce(handle, x, out, 0, 0)
    assert torch.equal(out, x)
    for call in (
        lambda: ops.all_reduce_reg(handle, x, out.zero_()),
        lambda: ops.all_reduce_unreg(handle, x, None, out.zero_()),
        lambda: ops.deterministic_all_reduce_reg(handle, x, out.zero_()),
        lambda: ops.deterministic_all_reduce_unreg(handle, x, None, out.zero_()),
    ):
        call()
        assert torch.equal(out, x)
    ops.register_buffer(handle, [])
    assert ops.get_graph_buffer_ipc_meta(handle) == ([], [])
    ops.register_graph_buffers(handle, [], [])
    assert ops.allocate_meta_buffer(ops.meta_size()).numel() == ops.meta_size() > 0
    ops.dispose(handle)
    with pytest.raises(BadArgument, match="`fa` is .*, not a handle of an all-reduce"):
        ops.all_reduce(handle, x, out)
    quick = ops.init_custom_qr(0, 1)
    ops.qr_all_reduce(quick, 1, x, out)
    assert torch.equal(out, rounded(x, 1))
    assert ops.qr_max_size() > 0
    ops.qr_destroy(quick)
    unique = ops.mscclpp_generate_unique_id()
    context = ops.mscclpp_init_context(unique, 0, 1, None, None, 1, None, None, 0)
    ops.mscclpp_allreduce(context, x, out.zero_(), 0, 0)
    assert torch.equal(out, x)


def test_raw_addresses_and_wrong_ranks_are_refused(group: None) -> None:
    with pytest.raises(BadArgument, match="`ipc_tensors` is list: raw addresses .* not opened"):
        ops.init_custom_ar([1 << 40, 1 << 41], None, 0, True)
    with pytest.raises(BadArgument, match="`rank` is 1, this process is rank 0"):
        ops.init_custom_ar(None, None, 1, True)
    with pytest.raises(BadArgument, match="`world_size` is 2, the default process group has 1"):
        ops.init_custom_qr(0, 2)
    for call in (
        lambda: ops.get_meta_buffer_ipc_handle(torch.empty(1)),
        lambda: ops.qr_get_handle(1),
        lambda: ops.qr_open_handles(1, []),
    ):
        with pytest.raises(BadArgument, match="raw handle .*SymmetricAllReduce"):
            call()
    with pytest.raises(BadArgument, match="`out` has shape"):
        ops.SymmetricAllReduce().all_reduce(torch.zeros(3), torch.zeros(4))


def test_without_a_group() -> None:
    with pytest.raises(BadArgument, match="no process group.*init_process_group"):
        ops.SymmetricAllReduce()


RANK = """
import sys
import torch
import torch.distributed as dist
from cairn import ops
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
group = ops.SymmetricAllReduce()
x = torch.tensor([256.0, 3.0]).bfloat16() if rank == 0 else torch.tensor([1.0, 4.0]).bfloat16()
group.all_reduce(x, x)
assert x.tolist() == [256.0, 7.0], x
y = torch.full((3,), float(rank + 1))
out = torch.empty(3)
ops.qr_all_reduce(ops.init_custom_qr(rank, 2), 3, y, out)
assert out.tolist() == [3.0] * 3, out
dist.destroy_process_group()
"""


def test_two_processes_have_the_same_sum(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    ranks = [Popen([sys.executable, "-c", RANK, str(rank), store]) for rank in (0, 1)]
    assert [one.wait(timeout=120) for one in ranks] == [0, 0]
