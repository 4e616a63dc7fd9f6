"""Caches of more than 2^31 elements, where 32-bit offsets would overflow."""

from __future__ import annotations

import pytest
import torch

from cairn.ops import cutlass_mla_decode, flash_attn_with_kvcache, gpu
from cairn.ops.attention.tuning import TUNING as ATTENTION_TUNING
from cairn.ops.flash_attn import wgmma_launch
from cairn.ops.flash_attn.launch import Task
from cairn.ops.flash_attn.tuning import TUNING
from tests.ops.tables import Tuned

pytestmark = pytest.mark.gpu
GIB = 1 << 30
LENGTH = 40


def needs(gibibytes: int) -> None:
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < gibibytes * GIB:
        pytest.skip(f"needs {gibibytes} GiB of free device memory")


@pytest.mark.parametrize("heads_first", [False, True])
def test_pages_and_heads_far_away(heads_first: bool) -> None:
    needs(12)
    pages, size, heads, dim = (1 << 17) + 3, 16, 8, 128
    near_k, near_v = (torch.randn(1, 48, heads, dim, device="cuda").half() for _ in range(2))
    table = torch.tensor([[pages - 1, 0, pages - 2]], dtype=torch.int32, device="cuda")
    caches = []
    for near in (near_k, near_v):
        if heads_first:
            # Head-major memory: a head's keys of all pages, then the next head's.
            memory = torch.empty(heads, pages, size, dim, dtype=torch.float16, device="cuda")
            cache = memory.permute(1, 2, 0, 3)
        else:
            cache = torch.empty(pages, size, heads, dim, dtype=torch.float16, device="cuda")
        cache[table[0].long()] = near.view(3, size, heads, dim)
        caches.append(cache)
    q = torch.randn(1, 2, heads, dim, device="cuda").half()
    new = [torch.randn(1, 2, heads, dim, device="cuda").half() for _ in range(2)]
    options = {"cache_seqlens": LENGTH, "causal": True}
    wanted = flash_attn_with_kvcache(q, near_k, near_v, *new, **options)
    got = flash_attn_with_kvcache(q, *caches, *new, page_table=table, **options)
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)
    assert torch.equal(caches[0][pages - 2, LENGTH % size], new[0][0, 0])


def test_queries_of_heads_far_away(tuned: Tuned) -> None:
    """The wgmma kernel with head-major queries."""
    if not gpu.supports_wgmma(torch.device("cuda", 0)):
        pytest.skip("needs Hopper's tensor cores and Triton 3.6")
    needs(24)
    tuned(ATTENTION_TUNING, tma_min_flops=0)
    tuned(TUNING, wgmma_full=0)
    heads, dim, count, apart = 32, 64, 200, (1 << 31) // (15 * 64) + 1
    q, k, v = (torch.randn(1, count, n, dim, device="cuda").half() for n in (heads, 2, 2))
    far, out = (
        torch.empty(1, heads, apart, dim, dtype=torch.float16, device="cuda") for _ in range(2)
    )
    far, out = (x[:, :, :count].transpose(1, 2) for x in (far, out))
    far.copy_(q)
    for x, o in ((q, torch.empty_like(q)), (far, out)):
        lse = torch.empty(1, heads, count, device="cuda")
        task = Task(x, k, v, o, lse, *[None] * 12, dim**-0.5, -1, 0, 0, 0.0, count)
        assert wgmma_launch.fits(task)
        wgmma_launch.attend(task)
        if x is q:
            wanted = o
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("heads", [16, 64])
def test_latents_far_away(heads: int) -> None:
    needs(6)
    pages, size, width = (1 << 16) + 3, 64, 576
    near = torch.randn(1, 64, width, device="cuda").half()
    cache = torch.empty(pages, size, width, dtype=torch.float16, device="cuda")
    cache[-1] = near[0]
    q = torch.randn(1, heads, width, device="cuda").half()
    given = (q[..., :512], q[..., 512:])
    length = torch.tensor([LENGTH], dtype=torch.int32, device="cuda")
    table = torch.tensor([[pages - 1]], dtype=torch.int32, device="cuda")
    got = cutlass_mla_decode(*given, cache, length, table, None, 0.05)
    wanted = cutlass_mla_decode(*given, near, length, table * 0, None, 0.05)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)
