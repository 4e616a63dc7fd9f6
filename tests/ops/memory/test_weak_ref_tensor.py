from __future__ import annotations

import gc
import weakref

import pytest
import torch

from cairn.errors import BadArgument
from cairn.ops import weak_ref_tensor


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool], ids=str
)
def test_is_the_same_memory(dtype: torch.dtype, device: str) -> None:
    whole = torch.ones(6, 10, dtype=dtype, device=device)
    for part in (whole, whole[1:, 2:7], whole.t(), whole[:0], whole[3, 4]):
        found = weak_ref_tensor(part)
        assert found.data_ptr() == part.data_ptr()
        assert (found.shape, found.stride(), found.dtype) == (part.shape, part.stride(), dtype)
        assert found.device == part.device
        assert torch.equal(found, part)
    weak_ref_tensor(whole[2])[5] = 0
    assert int((whole == 0).sum()) == 1
    assert not bool(whole[2, 5])


def test_does_not_keep_the_memory(device: str) -> None:
    owner = torch.ones(1000, device=device)
    freed = weakref.ref(owner.untyped_storage())
    found = weak_ref_tensor(owner)
    assert freed() is not None
    del owner
    gc.collect()
    assert freed() is None
    assert found.shape == (1000,)


@pytest.mark.gpu
def test_the_allocator_gets_the_memory_back() -> None:
    owner = torch.ones(1 << 20, device="cuda")
    found = weak_ref_tensor(owner)
    used = torch.cuda.memory_allocated()
    del owner
    assert torch.cuda.memory_allocated() == used - (4 << 20)
    assert found.is_cuda


@pytest.mark.parametrize("other", [None, 3, "name", (1, 2)])
def test_other_objects_are_returned(other: object) -> None:
    assert weak_ref_tensor(other) is other


def test_refuses_what_has_no_memory() -> None:
    with pytest.raises(BadArgument, match="`tensor`"):
        weak_ref_tensor(torch.empty(3, device="meta"))
    with pytest.raises(BadArgument, match="`tensor`"):
        weak_ref_tensor(torch.eye(3).to_sparse())
    conjugate = torch.tensor([1 + 2j]).conj()
    for lazy in (conjugate, conjugate.imag):
        with pytest.raises(BadArgument, match="`tensor` is not what its memory holds"):
            weak_ref_tensor(lazy)
