"""cutlass_mla_decode against float64 loops over slots."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from cairn.errors import BadArgument
from cairn.ops import cutlass_mla_decode, cutlass_mla_get_workspace_size, gpu
from tests.ops.attention.geometry import softmax_attention
from tests.ops.sampling.variants import runnable_on

VARIANTS = runnable_on(cutlass_mla_decode, "cpu")
LENGTHS = (37, 0, 1, 64, 5)


def drawn(dtype: torch.dtype, size: int, heads: int = 3) -> tuple[Tensor, ...]:
    """q_nope, q_pe, cache, seq_lens, page_table; NaN in slots without an owner."""
    g = torch.Generator().manual_seed(size)
    pages = -(-max(LENGTHS) // size)
    table = torch.randperm(len(LENGTHS) * pages + 1, generator=g)[:-1].view(len(LENGTHS), pages)
    cache = torch.full((table.numel() + 1, size, 24), torch.nan, dtype=dtype)
    for row, length in enumerate(LENGTHS):
        for slot in range(length):
            values = torch.randn(24, generator=g).to(dtype)
            cache[table[row, slot // size], slot % size] = values
    q = torch.randn(len(LENGTHS), heads, 24, generator=g).to(dtype)
    return q[..., :16], q[..., 16:], cache, torch.tensor(LENGTHS).int(), table.int()


def check(given: tuple[Tensor, ...], got: Tensor, tolerance: float) -> None:
    q_nope, q_pe, cache, _, table = given
    size = cache.shape[1]
    for row, length in enumerate(LENGTHS):
        slots = [cache[table[row, t // size], t % size].double() for t in range(length)]
        for head in range(q_nope.shape[1]):
            q = torch.cat((q_nope[row, head], q_pe[row, head])).double()
            if not slots:
                assert bool((got[row, head] == 0).all())
                continue
            wanted = softmax_attention(q, slots, slots, 0.3)[0][:16]
            torch.testing.assert_close(
                got[row, head].double(), wanted, rtol=tolerance, atol=tolerance
            )


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("size", [1, 7, 16])
def test_softmax_over_the_latents(size: int, name: str) -> None:
    given = drawn(torch.float32, size)
    check(given, cutlass_mla_decode.using(name)(*given, None, 0.3), 2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, device: str) -> None:
    given = drawn(dtype, 16)
    got = cutlass_mla_decode(*(x.to(device) for x in given), None, 0.3, num_kv_splits=-1)
    assert got.dtype == dtype
    check(given, got.cpu(), 1e-2)


@pytest.mark.skipif(not gpu.INTERPRETED, reason="needs Triton, and a machine without CUDA")
def test_slots_of_a_page_far_apart(tmp_path: Path) -> None:
    """Slots of other layers lie between them, so that element offsets exceed 32 bits."""
    step, slots = 1 << 26, 40
    file = tmp_path / "cache"
    # A sparse file: most of it takes no memory.
    with file.open("wb") as empty:
        empty.truncate(4 * step * slots)
    memory = torch.from_file(str(file), shared=True, size=step * slots)
    cache = memory.view(1, slots, step)[..., :24]
    cache.copy_(torch.randn(1, slots, 24))
    q = torch.randn(1, 3, 24)
    length, table = torch.tensor([slots]).int(), torch.zeros(1, 1).int()
    run = cutlass_mla_decode.using("triton")
    got, wanted = (
        run(q[..., :16], q[..., 16:], keys, length, table, None, 0.2)
        for keys in (cache, cache.clone())
    )
    assert torch.equal(got, wanted)


def test_workspace_can_be_allocated() -> None:
    size = cutlass_mla_get_workspace_size(128 * 1024, 8, sm_count=132, num_kv_splits=-1)
    given = drawn(torch.float32, 16)
    cutlass_mla_decode(*given, torch.empty(size, dtype=torch.uint8), 0.3)
    with pytest.raises(BadArgument, match="`num_batches`"):
        cutlass_mla_get_workspace_size(1, -1)


def test_wrong_arguments_are_named() -> None:
    q_nope, q_pe, cache, lengths, table = drawn(torch.float32, 16)
    for given, named in (
        ((q_nope[0], q_pe, cache, lengths, table), "q_nope"),
        ((q_nope.repeat(1, 43, 1), q_pe, cache, lengths, table), "q_nope"),
        ((q_nope.double(), q_pe, cache, lengths, table), "q_nope"),
        ((q_nope, q_pe[:, :2], cache, lengths, table), "q_pe"),
        ((q_nope, q_pe, cache[..., :23], lengths, table), "kv_c_and_k_pe_cache"),
        ((q_nope, q_pe, cache.bfloat16(), lengths, table), "kv_c_and_k_pe_cache"),
        ((q_nope, q_pe, cache, lengths[:2], table), "seq_lens"),
        ((q_nope, q_pe, cache, lengths, table.long()), "page_table"),
        ((q_nope, q_pe, cache, lengths, table.to("meta")), "page_table"),
    ):
        with pytest.raises(BadArgument, match=f"cutlass_mla_decode: argument `{named}`"):
            cutlass_mla_decode(*given, None, 1.0)
