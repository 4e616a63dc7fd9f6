"""Memory that is used again: whose it is, and where it may be written."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from cairn.ops.scratch import scratch


def test_a_name_is_the_same_memory_until_it_has_to_grow() -> None:
    first = scratch("test again", (3, 4), torch.float32)
    smaller = scratch("test again", (5,), torch.float32)
    assert smaller.data_ptr() == first.data_ptr() and smaller.shape == (5,)
    larger = scratch("test again", (6, 4), torch.float32)
    assert larger.shape == (6, 4)
    assert scratch("test again", (3, 4), torch.float32).data_ptr() == larger.data_ptr()


def test_names_dtypes_and_threads_have_their_own() -> None:
    one = scratch("test own", (8,), torch.float32)
    others = [scratch("test other", (8,), torch.float32), scratch("test own", (8,), torch.bfloat16)]
    with ThreadPoolExecutor(1) as pool:
        others.append(pool.submit(scratch, "test own", (8,), torch.float32).result())
    assert one.data_ptr() not in [other.data_ptr() for other in others]


def test_what_is_made_in_inference_mode_is_written_outside() -> None:
    with torch.inference_mode():
        scratch("test mode", (4,), torch.float32).zero_()
    again = scratch("test mode", (4,), torch.float32)
    torch.mul(torch.ones(4), 2.0, out=again)
    assert again.tolist() == [2.0] * 4
