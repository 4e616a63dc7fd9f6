"""Device tensors of the pages: shapes, sizes, refusal."""

from __future__ import annotations

import pytest
import torch

from cairn.cache.pools import CachePools, CacheSpec, bytes_per_page
from cairn.errors import OutOfMemory

DENSE = CacheSpec(num_kv_heads=2, head_dim=64)
PRIOR = CacheSpec(num_kv_heads=2, head_dim=64, num_heads=16, summary_heads=16, bias=True)
MEAN = CacheSpec(num_kv_heads=4, head_dim=32, num_heads=8, summary_heads=4, bias=True)
SPECS = [DENSE, PRIOR, MEAN]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_shapes_and_dtypes(dtype: torch.dtype) -> None:
    pools = CachePools(SPECS, num_pages=5, page_size=16, dtype=dtype, device="cpu")
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
    pools = CachePools([spec], 3, 4, torch.float32, "cpu")
    assert pools.summary_key == [None]
    assert pools.summary_bias[0] is not None
    assert pools.k[0][:, :, -1].shape == (3, 2, 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_size_is_what_is_allocated(dtype: torch.dtype) -> None:
    pools = CachePools(SPECS, num_pages=7, page_size=4, dtype=dtype, device="cpu")
    allocated = sum(tensor.numel() * tensor.element_size() for tensor in pools.tensors())
    assert allocated == pools.nbytes == 7 * bytes_per_page(SPECS, 4, dtype)


def test_bytes_of_a_known_model() -> None:
    # 16 layers, 2 KV heads of 64, pages of 64, bfloat16: 32 KiB of keys and values per layer,
    # 16 summary heads of 64 (2 KiB) and 16 float32 biases (64 bytes).
    assert bytes_per_page([PRIOR] * 16, 64, torch.bfloat16) == 16 * (32768 + 2048 + 64)


def test_nothing_is_shared_between_layers() -> None:
    pools = CachePools([PRIOR, PRIOR], 2, 4, torch.float32, "cpu")
    tensors = list(pools.tensors())
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    assert [int(tensor.flatten()[0]) for tensor in tensors] == list(range(len(tensors)))


def test_a_bias_needs_the_query_heads() -> None:
    with pytest.raises(ValueError, match="num_heads"):
        CacheSpec(num_kv_heads=2, head_dim=8, bias=True)


@pytest.mark.parametrize("num_pages", [10**12, 10**17])
def test_too_much_is_refused_with_the_bytes(num_pages: int) -> None:
    asked = num_pages * bytes_per_page([DENSE], 64, torch.float32)
    with pytest.raises(OutOfMemory, match=str(asked)):
        CachePools([DENSE], num_pages, 64, torch.float32, "cpu")


def test_other_failures_are_not_disguised() -> None:
    with pytest.raises(RuntimeError) as caught:
        CachePools([DENSE], 1, 4, torch.float32, "no such device")
    assert not isinstance(caught.value, OutOfMemory)
