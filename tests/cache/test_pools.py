"""Device tensors of the pages: shapes, sizes, refusal."""

from __future__ import annotations

import pytest
import torch

from cairn.cache.pools import CachePools, CacheSpec, PageFormat
from cairn.errors import OutOfMemory

DENSE = CacheSpec(num_kv_heads=2, head_dim=64)
PRIOR = CacheSpec(num_kv_heads=2, head_dim=64, num_heads=16, summary_heads=16, bias=True)
MEAN = CacheSpec(num_kv_heads=4, head_dim=32, num_heads=8, summary_heads=4, bias=True)
SPECS = [DENSE, PRIOR, MEAN]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_shapes_and_dtypes(dtype: torch.dtype) -> None:
    pools = CachePools(SPECS, 5, PageFormat(16, dtype), device="cpu")
    for layer, spec in enumerate(SPECS):
        shape = (5, spec.num_kv_heads, 16, spec.head_dim)
        for tensor in (pools.k[layer], pools.v[layer]):
            assert tensor.shape == shape
            assert tensor.dtype == dtype
            assert tensor.is_contiguous()
    assert pools.summary_key[0] is None
    assert pools.summary_bias[0] is None
    for layer, heads, d, query_heads in ((1, 16, 64, 16), (2, 4, 32, 8)):
        key, bias = pools.summary_key[layer], pools.summary_bias[layer]
        assert key is not None
        assert bias is not None
        assert (key.shape, key.dtype) == ((5, heads, d), dtype)
        assert (bias.shape, bias.dtype) == ((5, query_heads), torch.float32)


def test_bias_without_a_stored_key() -> None:
    spec = CacheSpec(num_kv_heads=2, head_dim=8, num_heads=4, bias=True)
    pools = CachePools([spec], 3, PageFormat(4, torch.float32), "cpu")
    assert pools.summary_key == [None]
    assert pools.summary_bias[0] is not None
    assert pools.k[0][:, :, -1].shape == (3, 2, 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_size_is_what_is_allocated(dtype: torch.dtype) -> None:
    pools = CachePools(SPECS, 7, PageFormat(4, dtype), device="cpu")
    allocated = sum(tensor.numel() * tensor.element_size() for tensor in pools.tensors())
    assert allocated == pools.nbytes == 7 * PageFormat(4, dtype).bytes_per_page(SPECS)


def test_bytes_of_a_known_model() -> None:
    # 16 layers, 2 KV heads of 64, pages of 64, bfloat16: 32 KiB of keys and values per layer,
    # 16 summary heads of 64 (2 KiB) and 16 float32 biases (64 bytes).
    assert PageFormat(64, torch.bfloat16).bytes_per_page([PRIOR] * 16) == 16 * (32768 + 2048 + 64)


def test_in_8_bits_a_slot_takes_a_byte_a_number_and_one_more() -> None:
    form = PageFormat(64, torch.bfloat16, quantized=True)
    assert form.bytes_per_page([PRIOR] * 16) == 16 * (2 * 2 * 64 * 65 + 2048 + 64)
    own = CacheSpec(num_kv_heads=2, head_dim=64, own_key=True)
    assert form.bytes_per_page([own]) == 2 * 2 * 64 * 65 + 2 * 64 * 2
    assert PageFormat(64, torch.bfloat16).bytes_per_page([own]) == 2 * 2 * 64 * 64 * 2
    pools = CachePools([PRIOR, own, DENSE], 3, form, "cpu")
    assert sum(tensor.nbytes for tensor in pools.tensors()) == pools.nbytes
    for cache in (*pools.k, *pools.v):
        assert (cache.shape, cache.dtype) == ((3, 2, 64, 65), torch.uint8)
    keys = [None if key is None else (key.shape, key.dtype) for key in pools.summary_key]
    assert keys == [((3, 16, 64), torch.bfloat16), ((3, 2, 64), torch.bfloat16), None]


def test_nothing_is_shared_between_layers() -> None:
    pools = CachePools([PRIOR, PRIOR], 2, PageFormat(4, torch.float32), "cpu")
    tensors = list(pools.tensors())
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    assert [int(tensor.flatten()[0]) for tensor in tensors] == list(range(len(tensors)))


def test_a_bias_needs_the_query_heads() -> None:
    with pytest.raises(ValueError, match="num_heads"):
        CacheSpec(num_kv_heads=2, head_dim=8, bias=True)


@pytest.mark.parametrize("num_pages", [10**12, 10**17])
def test_too_much_is_refused_with_the_bytes(num_pages: int) -> None:
    asked = num_pages * PageFormat(64, torch.float32).bytes_per_page([DENSE])
    with pytest.raises(OutOfMemory, match=str(asked)):
        CachePools([DENSE], num_pages, PageFormat(64, torch.float32), "cpu")


def test_other_failures_are_not_disguised() -> None:
    with pytest.raises(RuntimeError) as caught:
        CachePools([DENSE], 1, PageFormat(4, torch.float32), "no such device")
    assert not isinstance(caught.value, OutOfMemory)
