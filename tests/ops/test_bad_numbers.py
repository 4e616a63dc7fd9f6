"""Out-of-range values in index tensors on the host are refused before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from cairn import ops
from cairn.errors import BadArgument
from cairn.ops.checks import expect_within


def f(*sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(len(sizes)))


def words(*numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def slots(*numbers: int) -> Tensor:
    return torch.tensor(numbers)


LENGTHS, TABLE = words(3, 5), words([0, 7], [1, 2])
"""Lengths of two sequences in pages of 4; the second page of the first is unused."""
NEW = {"k": f(2, 1, 2, 16), "v": f(2, 1, 2, 16)}
ENDS, KEY_ENDS = words(0, 1, 3), words(0, 4, 9)
RAGGED_NEW = {"k": f(3, 2, 16), "v": f(3, 2, 16), "cu_seqlens_k_new": ENDS}
ANGLES = {"rotary_cos": f(6, 8), "rotary_sin": f(6, 8)}


def cached(**change: Any) -> Any:
    """`flash_attn_with_kvcache` with one query per sequence and six pages."""
    given = {"cache_seqlens": LENGTHS, "page_table": TABLE, **change}
    return ops.flash_attn_with_kvcache(f(2, 1, 4, 16), f(6, 4, 2, 16), f(6, 4, 2, 16), **given)


def whole(**change: Any) -> Any:
    """The same with two rows of eight keys."""
    given = {"cache_seqlens": LENGTHS, **change}
    return ops.flash_attn_with_kvcache(f(2, 1, 4, 16), f(2, 8, 2, 16), f(2, 8, 2, 16), **given)


def ragged(table: Tensor = TABLE, lengths: Tensor = LENGTHS, **options: Any) -> Any:
    """`flash_attn_varlen_func` with the same pages."""
    caches, where = (f(6, 4, 2, 16), f(6, 4, 2, 16)), {"seqused_k": lengths, "page_table": table}
    return ops.flash_attn_varlen_func(f(3, 4, 16), *caches, ENDS, None, **where, **options)


def uneven(ends: Tensor = ENDS, key_ends: Tensor = KEY_ENDS, **options: Any) -> Any:
    """The same with unpaged keys."""
    given = (f(3, 4, 16), f(9, 2, 16), f(9, 2, 16), ends, key_ends)
    return ops.flash_attn_varlen_func(*given, **options)


def decode(table: Tensor = TABLE, lengths: Tensor = LENGTHS) -> Any:
    cache = f(6, 4, 24)
    return ops.cutlass_mla_decode(f(2, 4, 16), f(2, 4, 8), cache, lengths, table, None, 0.1)


def turn(*positions: int) -> Any:
    return ops.rotary_embedding(slots(*positions), f(2, 32), f(2, 16), 16, f(9, 16))


def turn_and_store(*location: int, positions: Tensor = ENDS[:2], buffer: int = 5) -> Any:
    where = ops.FusedSetKVBufferArg(f(2, 16), f(9, 16), f(buffer, 16), cache_loc=slots(*location))
    given = (positions, f(2, 32), f(2, 16), 16, f(9, 16))
    return ops.apply_rope_with_cos_sin_cache_inplace(*given, fused_set_kv_buffer_arg=where)


def transfer(src: Tensor, dst: Tensor) -> Any:
    """A transfer of 16-byte items from 8 slots to 5."""
    buffers = (f(8, 4), f(9, 4), f(8, 4), f(5, 4))
    return ops.transfer_kv_per_layer(*buffers, src, dst, 16)


def transfer_pages(src: Tensor, dst: Tensor) -> Any:
    """To two pages of three slots, in two heads and a layer."""
    pages, layers = f(2, 2, 3, 1, 2), f(8, 4)
    table = torch.tensor([layers.data_ptr()]).view(torch.uint64)
    copy = ops.transfer_kv_all_layer_lf_ph
    return copy(table, pages, table, pages, src, dst, 16, 16, 1, 3, 2)


def mask(indices: Any) -> Any:
    return ops.apply_token_bitmask_inplace_cuda(f(3, 40), torch.zeros(4, 2).int(), indices)


def downcast(location: Tensor, *where: int, slots_of_v: int = 9) -> Any:
    out = [torch.empty(n, 1, 2, dtype=torch.uint8) for n in (9, slots_of_v)]
    return ops.downcast_fp8(f(2, 1, 2), f(2, 1, 2), *out, None, None, location, *where)


ODDS = f(3, 9).softmax(-1)
ROWS = (f(2, 4), f(2, 4))
BAD: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], str]] = [
    (turn, (3, 9), {}, "`positions` holds 9, not numbers from 0 to 8"),
    (turn, (-1, 3), {}, "`positions` holds -1, not numbers from 0 to 8"),
    (turn_and_store, (1, 5), {}, "`cache_loc` holds 5, not numbers up to 4"),
    (turn_and_store, (1, 2), {"positions": words(9, 9)}, "`positions` holds 9, not numbers from 0"),
    (transfer, (slots(0, 8), slots(1, 2)), {}, "`src_indices` holds 8, not numbers from 0 to 7"),
    (transfer, (slots(0, 7), slots(5, 2)), {}, "`dst_indices` holds 5, not numbers from 0 to 4"),
    (
        transfer_pages,
        (slots(0, 7), slots(5, 6)),
        {},
        "`dst_indices` holds 6, not numbers from 0 to",
    ),
    (cached, (), {"page_table": words([0, 7], [1, 6])}, "`page_table` holds 6, not numbers from 0"),
    (cached, (), {"page_table": words([0, 7], [1, -1])}, "`page_table` holds -1, not numbers from"),
    (
        cached,
        (),
        {"page_table": words([0, 7], [6, 1]), "window_size": (2, 0)},
        "holds 6, not numbe",
    ),
    (cached, (), {"cache_seqlens": None}, "`page_table` holds 7, not numbers from 0 to 5"),
    (cached, (), {"cache_seqlens": words(3, 9)}, "`cache_seqlens` gives a sequence the length 9"),
    (cached, (), {"cache_batch_idx": words(0, 2)}, "`cache_batch_idx` holds 2, not numbers from 0"),
    (cached, (), {**NEW, "page_table": words([6, 7], [1, 2])}, "`page_table` holds 6, not numbers"),
    (
        cached,
        (),
        {**NEW, "cache_seqlens": words(3, 8)},
        "gives a sequence the length 9, not 0 to 8",
    ),
    (cached, (), {**NEW, "cache_seqlens": words(-1, 5)}, "`cache_seqlens` holds -1, not numbers"),
    (
        cached,
        (),
        {**RAGGED_NEW, "cache_seqlens": words(3, 7)},
        "gives a sequence the length 9, not",
    ),
    (cached, (), {**NEW, **ANGLES, "cache_seqlens": words(3, 6)}, "has 6 rows, none of position 6"),
    (cached, (), {**ANGLES, "rotary_seqlens": words(-2, 0)}, "has 6 rows, none of position -2"),
    (whole, (), {"cache_seqlens": 9}, "`cache_seqlens` gives a sequence the length 9, not 0 to 8"),
    (whole, (), {"cache_batch_idx": words(0, -1)}, "`cache_batch_idx` holds -1, not numbers from"),
    (ragged, (words([0, 7], [1, 6]),), {}, "`page_table` holds 6, not numbers from 0 to 5"),
    (uneven, (words(0, 1, 4),), {}, "`cu_seqlens_q` holds 4, not numbers from 0 to 3"),
    (uneven, (ENDS, words(-1, 4, 9)), {}, "`cu_seqlens_k` holds -1, not numbers from 0 to 9"),
    (uneven, (), {"seqused_q": words(1, 3)}, "`seqused_q` gives a sequence the length 3, not 0 to"),
    (uneven, (), {"seqused_k": words(5, 5)}, "`seqused_k` gives a sequence the length 5, not 0 to"),
    (ragged, (TABLE, words(3, 9)), {}, "`seqused_k` gives a sequence the length 9, not 0 to 8"),
    (ops.sampling_from_probs, (ODDS,), {"indices": words(0, 3)}, "`indices` holds 3, not numbers"),
    (mask, ([1, 3],), {}, "`indices` holds 3, not numbers from 0 to 2"),
    (mask, (slots(1, -1),), {}, "`indices` holds -1, not numbers from 0 to 2"),
    (ops.set_kv_buffer_kernel, (*ROWS, slots(-4, 5), *ROWS), {}, "`loc` holds 5, not numbers up t"),
    (downcast, (slots(-4, 9),), {}, "`loc * mult + offset` holds 9, not numbers from 0 to 8"),
    (downcast, (slots(1, 2), 3, 2), {"slots_of_v": 8}, "`loc * mult + offset` holds 8, not num"),
    (ops.resolve_future_token_ids, (slots(9, -3), slots(5, 6, 7)), {}, "`input_ids` holds -3, not"),
    (decode, (words([0, 7], [-1, 2]),), {}, "`page_table` holds -1, not numbers from 0 to 5"),
    (decode, (TABLE, words(9, 1)), {}, "`seq_lens` holds 9, not numbers from 0 to 8"),
]


@pytest.mark.parametrize("call, args, kwargs, said", BAD)
def test_places_that_there_are_not_are_named(
    call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], said: str
) -> None:
    with pytest.raises(BadArgument, match="argument `") as refused:
        call(*args, **kwargs)
    assert said in str(refused.value)


def test_nothing_is_written_where_new_keys_have_no_place() -> None:
    for change in ({"cache_seqlens": words(3, 8)}, {"page_table": words([0, 7], [1, 6])}):
        caches = f(6, 4, 2, 16), f(6, 4, 2, 16)
        given = {"cache_seqlens": LENGTHS, "page_table": TABLE, **NEW, **change}
        with pytest.raises(BadArgument):
            ops.flash_attn_with_kvcache(f(2, 1, 4, 16), *caches, **given)
        assert all(torch.equal(cache, f(6, 4, 2, 16)) for cache in caches)


def test_unused_values_may_be_out_of_range() -> None:
    cached(**NEW)
    ragged()
    uneven(words(1, 1, 2), words(2, 4, 9), seqused_q=words(0, 1), seqused_k=words(2, 3))
    decode()
    turn_and_store(-7, 4)
    transfer(slots(-1, 8, 3), slots(9, -1, 4))
    downcast(slots(-9, 4), 2, 0)
    ops.resolve_future_token_ids(slots(1, -9), slots(1)[:0])
    # Sequences without queries.
    for unused in ({}, {"seqused_q": words(0, 2)}):
        ends = ENDS if unused else words(0, 0, 3)
        caches = f(6, 4, 2, 16), f(6, 4, 2, 16)
        where = {"seqused_k": words(99, 5), "page_table": words([-1, 7], [1, 2])}
        for softcap in (0.0, 2.0):
            given = {"softcap": softcap, **where, **unused}
            ops.flash_attn_varlen_func(f(3, 4, 16), *caches, ends, None, **given)
    hidden = words([0, 7], [-1, 2])
    for rule in ({"window_size": (0, 0)}, {"attention_chunk": 4}, {"cache_leftpad": words(0, 4)}):
        assert bool(cached(page_table=hidden, **rule).isfinite().all())
    assert bool(ragged(hidden, words(3, 6), window_size=(1, 0)).isfinite().all())


def test_values_of_unknown_number_are_not_checked_while_tracing() -> None:
    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes):
        numbers = torch.empty(shapes.create_unbacked_symint(), dtype=torch.int64)
        expect_within("op", "numbers", numbers, 3)


def test_values_are_not_checked_while_tracing() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert cached().shape == (2, 1, 4, 16)
        assert decode().shape == (2, 4, 16)
        turn(3, 9)
        transfer(slots(0, 8), slots(1, 2))
