"""apply_rope_with_cos_sin_cache_inplace against complex numbers and a loop over slots."""

from __future__ import annotations

import pytest
import torch

from cairn.errors import BadArgument
from cairn.ops import (
    FusedSetKVBufferArg,
    apply_rope_with_cos_sin_cache_inplace,
    rotary_cos_sin,
    rotary_embedding,
)
from cairn.ops.rotary.apply_rope_with_cos_sin_cache_inplace import rotary_set_kv
from tests.ops.rotary.test_rotary_embedding import oracle
from tests.ops.sampling.variants import runnable_on


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("rotary", [8, 4])
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_and_cache(is_neox: bool, rotary: int, flat: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    table = rotary_cos_sin(torch.arange(40), torch.rand(rotary // 2))
    positions = torch.randint(0, 40, (7,), dtype=torch.int32)
    slots = torch.tensor([8, 0, 3, 11, 5, 2, 7])
    query, key = torch.randn(7, 3, 8).to(dtype), torch.randn(7, 2, 8).to(dtype)
    value = torch.randn(7, 2, 8).to(dtype)
    expected = [oracle(x.double(), table[positions].double(), is_neox) for x in (query, key)]
    k_buffer, v_buffer = torch.randn(12, 2, 8).to(dtype), torch.randn(12, 2, 8).to(dtype)
    before = k_buffer.clone(), v_buffer.clone()
    given = [query, key, value, k_buffer, v_buffer]
    query, key, value, k_buffer, v_buffer = (x.flatten(1) if flat else x for x in given)
    store = FusedSetKVBufferArg(
        value=value, k_buffer=k_buffer, v_buffer=v_buffer, cache_loc=slots, v_scale=0.5
    )
    apply_rope_with_cos_sin_cache_inplace(
        positions, query, key, 8, table, is_neox, fused_set_kv_buffer_arg=store
    )
    half_unit = torch.finfo(dtype).eps / 2
    for got, wanted in zip((query, key), expected, strict=True):
        wanted = wanted.view(got.shape)
        torch.testing.assert_close(got.double(), wanted, rtol=half_unit * 1.01, atol=1e-6)
    for row in range(12):
        if row in slots.tolist():
            token = slots.tolist().index(row)
            assert torch.equal(k_buffer[row], key[token])
            assert torch.equal(v_buffer[row], (value[token].float() / 0.5).to(dtype))
        else:
            assert torch.equal(k_buffer[row].flatten(), before[0][row].flatten())
            assert torch.equal(v_buffer[row].flatten(), before[1][row].flatten())


def test_without_a_cache_it_is_the_rotation() -> None:
    table, positions = torch.randn(10, 8), torch.randint(0, 10, (5,))
    query, key = torch.randn(5, 16), torch.randn(5, 8)
    other = query.clone(), key.clone()
    apply_rope_with_cos_sin_cache_inplace(positions, query, key, 8, table)
    rotary_embedding(positions, *other, 8, table)
    assert torch.equal(query, other[0]) and torch.equal(key, other[1])


def test_float8_cache_is_cut_off() -> None:
    eight = torch.float8_e4m3fn
    table = torch.cat((torch.ones(3, 4), torch.zeros(3, 4)), dim=1)
    key = torch.tensor([[1e5] * 8, [-1e5] * 8, [1.0] * 8])
    buffers = [torch.zeros(3, 8, dtype=eight) for _ in range(2)]
    store = FusedSetKVBufferArg(key.clone(), *buffers, cache_loc=torch.arange(3))
    apply_rope_with_cos_sin_cache_inplace(torch.arange(3), key.clone(), key, 8, table, True, store)
    for buffer in buffers:
        assert buffer.float()[:, 0].tolist() == [448.0, -448.0, 1.0]


@pytest.mark.parametrize("scale", [1.0, 0.25, -8.0, 2.0**-126, 2.0**126, 2.0**-140, 0.3, 3e38])
@pytest.mark.parametrize("name", runnable_on(rotary_set_kv, "cpu"))
def test_stored_keys_and_values_are_quotients(name: str, scale: float) -> None:
    table = torch.cat((torch.ones(9, 3), torch.zeros(9, 3)), dim=1)
    key = torch.randn(9, 6) * torch.logspace(-44, 38, 9).unsqueeze(1)
    k_buffer, v_buffer = torch.zeros(9, 6), torch.zeros(9, 6)
    rotary_set_kv.using(name)(
        *(torch.arange(9), torch.ones(9, 6), key.clone(), 6, table, key, k_buffer, v_buffer),
        *(torch.arange(9), scale, scale),
    )
    quotient = key / torch.tensor(scale)
    assert torch.equal(k_buffer, quotient) and torch.equal(v_buffer, quotient)


@pytest.mark.parametrize("slots", [[-1, 2], [2, -3], [-1, -2]])
@pytest.mark.parametrize("name", runnable_on(rotary_set_kv, "cpu"))
def test_a_negative_slot_is_not_written(name: str, slots: list[int]) -> None:
    table, positions = torch.rand(3, 4) + 0.5, torch.tensor([1, 2])
    query, key, value = (torch.ones(2, 6) for _ in range(3))
    k_memory, v_memory = torch.zeros(20, 6), torch.zeros(20, 6)
    # Rows before and after the buffers; 4 elements of a head are rotated and 2 are not.
    rotary_set_kv.using(name)(
        *(positions, query, key, 6, table, value, k_memory[8:12], v_memory[8:12]),
        torch.tensor(slots),
    )
    written = [8 + slot for slot in slots if slot >= 0]
    for memory in (k_memory, v_memory):
        assert memory.all(-1).nonzero().flatten().tolist() == written
        assert memory.any(-1).nonzero().flatten().tolist() == written
    assert not torch.equal(key[:, :4], torch.ones(2, 4))


def test_wrong_arguments_are_named() -> None:
    table, positions = torch.randn(10, 8), torch.arange(5)
    query, key = torch.randn(5, 16), torch.randn(5, 8)
    with pytest.raises(BadArgument, match="`cos_sin_cache` is float64"):
        apply_rope_with_cos_sin_cache_inplace(positions, query, key, 8, table.double())
    rows = torch.zeros(4, 8)
    with pytest.raises(BadArgument, match="has no cache_loc"):
        store = FusedSetKVBufferArg(key, rows, rows)
        apply_rope_with_cos_sin_cache_inplace(positions, query, key, 8, table, True, store)
    with pytest.raises(BadArgument, match="`k_buffer` has shape \\[4, 7\\]"):
        store = FusedSetKVBufferArg(key, rows[:, :7], rows, cache_loc=positions)
        apply_rope_with_cos_sin_cache_inplace(positions, query, key, 8, table, True, store)
