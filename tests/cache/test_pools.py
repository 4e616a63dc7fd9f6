"""Device tensors of what layers keep: shapes, groups, sizes, errors."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from cairn.attention.registry import cache_schema
from cairn.cache.pools import CachePools, PoolSizes
from cairn.cache.schema import CacheSchema, LayerSchema, PageField, PageFormat, RowField
from cairn.errors import BadConfig, OutOfMemory
from cairn.specs.gqa import GqaSpec
from cairn.specs.hils import HilsSpec
from cairn.specs.kv_format import FP4_E2M1, FP8_E4M3

F32, BF16 = torch.float32, torch.bfloat16
DENSE = GqaSpec(num_heads=16, num_kv_heads=2, head_dim=64, rotary=None)
WINDOW = GqaSpec(num_heads=16, num_kv_heads=2, head_dim=64, rotary=None, window=100)
PRIOR = HilsSpec(
    num_heads=16, num_kv_heads=2, head_dim=64, rotary=None, window=32, topk=2, softmax1=True,
    summary="prior", bias_by_entropy=True,
)  # fmt: skip
MEAN = HilsSpec(
    num_heads=8, num_kv_heads=4, head_dim=32, rotary=None, window=32, topk=2, softmax1=True,
    summary="mean", bias_by_entropy=True,
)  # fmt: skip
OWN_KEY = HilsSpec(
    num_heads=16, num_kv_heads=2, head_dim=64, rotary=None, window=32, topk=2, softmax1=True,
    summary="landmark", bias_by_entropy=False,
)  # fmt: skip
MIXERS = [DENSE, PRIOR, MEAN]
STATE = LayerSchema(rows=(RowField("state", (2, 3), F32), RowField("tail", (5,), BF16)))


def pools_of(mixers, pages: int, form: PageFormat, device: str = "cpu", **options) -> CachePools:
    return CachePools(cache_schema(mixers, form), PoolSizes((pages,)), device, **options)


def page_bytes(mixers, form: PageFormat) -> int:
    (group,) = cache_schema(mixers, form).groups
    return group.page_bytes


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_shapes_and_dtypes(dtype: torch.dtype) -> None:
    pools = pools_of(MIXERS, 5, PageFormat(16, dtype))
    for fields, spec in zip(pools.pages, MIXERS, strict=True):
        shape = (5, spec.num_kv_heads, 16, spec.head_dim)
        for name in ("k", "v"):
            assert fields[name].shape == shape
            assert fields[name].dtype == dtype
            assert fields[name].is_contiguous()
    assert set(pools.pages[0]) == {"k", "v"}
    for layer, heads, d, query_heads in ((1, 16, 64, 16), (2, 4, 32, 8)):
        key, bias = pools.pages[layer]["summary_key"], pools.pages[layer]["summary_bias"]
        assert (key.shape, key.dtype) == ((5, heads, d), dtype)
        assert (bias.shape, bias.dtype) == ((5, query_heads), F32)


def test_a_landmarks_own_key_is_not_stored_again() -> None:
    pools = pools_of([OWN_KEY], 3, PageFormat(4, F32))
    assert set(pools.pages[0]) == {"k", "v"}
    assert pools.pages[0]["k"][:, :, -1].shape == (3, 2, 64)
    biased = pools_of([replace(OWN_KEY, bias_by_entropy=True)], 3, PageFormat(4, F32))
    assert set(biased.pages[0]) == {"k", "v", "summary_bias"}


@pytest.mark.parametrize("spare", [False, True])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_the_size_is_what_is_allocated(dtype: torch.dtype, spare: bool) -> None:
    form = PageFormat(4, dtype)
    pools = pools_of(MIXERS, 7, form, spare=spare)
    allocated = sum(tensor.numel() * tensor.element_size() for tensor in pools.tensors())
    assert allocated == pools.nbytes == (7 + spare) * page_bytes(MIXERS, form)
    assert pools.num_pages == 7
    assert pools.spare_pages == ((7,) if spare else None)


def test_bytes_of_a_known_model() -> None:
    # 16 layers, 2 KV heads of 64, pages of 64, bfloat16: 32 KiB of keys and values per layer,
    # 16 summary heads of 64 (2 KiB) and 16 float32 biases (64 bytes).
    schema = cache_schema([PRIOR] * 16, PageFormat(64, BF16))
    assert [group.page_bytes for group in schema.groups] == [16 * (32768 + 2048 + 64)]
    assert schema.summary_bytes == 16 * (2048 + 64)


def test_in_4_bits_a_slot_has_a_scale_for_16_numbers() -> None:
    form = PageFormat(64, BF16, FP4_E2M1)
    assert page_bytes([PRIOR] * 16, form) == 16 * (2 * 2 * 64 * 36 + 2048 + 64)
    with pytest.raises(BadConfig, match="fp4_e2m1, but heads of 72 .*blocks of 16.*auto"):
        form.keys_and_values(2, 72)


def test_in_8_bits_a_slot_takes_a_byte_a_number_and_one_more() -> None:
    form = PageFormat(64, BF16, FP8_E4M3)
    assert page_bytes([PRIOR] * 16, form) == 16 * (2 * 2 * 64 * 65 + 2048 + 64)
    assert page_bytes([OWN_KEY], form) == 2 * 2 * 64 * 65 + 2 * 64 * 2
    assert page_bytes([OWN_KEY], PageFormat(64, BF16)) == 2 * 2 * 64 * 64 * 2
    pools = pools_of([PRIOR, OWN_KEY, DENSE], 3, form)
    assert sum(tensor.nbytes for tensor in pools.tensors()) == pools.nbytes
    for fields in pools.pages:
        for cache in (fields["k"], fields["v"]):
            assert (cache.shape, cache.dtype) == ((3, 2, 64, 65), torch.uint8)
    keys = [fields.get("summary_key") for fields in pools.pages]
    assert [None if key is None else (key.shape, key.dtype) for key in keys] == [
        ((3, 16, 64), BF16), ((3, 2, 64), BF16), None
    ]  # fmt: skip


def test_nothing_is_shared_between_layers() -> None:
    pools = pools_of([PRIOR, PRIOR], 2, PageFormat(4, F32))
    tensors = list(pools.tensors())
    assert len(tensors) == 8
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    assert [int(tensor.flatten()[0]) for tensor in tensors] == list(range(len(tensors)))


def test_windowed_layers_beside_others_have_pages_of_their_own() -> None:
    schema = cache_schema([WINDOW, DENSE, WINDOW, PRIOR], PageFormat(16, F32))
    assert [group.layers for group in schema.groups] == [(1, 3), (0, 2)]
    assert [groups["k"] for groups in schema.group_of] == [1, 0, 1, 0]
    # The first of 100 slots is at most 7 pages of 16 slots before the last.
    assert [group.reach for group in schema.groups] == [None, 7] and schema.reach == 7
    pools = CachePools(schema, PoolSizes((5, 3)), "cpu", spare=True)
    assert [len(fields["k"]) for fields in pools.pages] == [4, 6, 4, 6]
    assert pools.spare_pages == (5, 3)
    assert [len(list(pools.tensors(group))) for group in (None, 0, 1)] == [10, 6, 4]
    assert pools.nbytes == sum(tensor.nbytes for tensor in pools.tensors())
    for sizes in ((5,), (5, 3, 1)):
        with pytest.raises(ValueError, match="2 page groups"):
            CachePools(schema, PoolSizes(sizes), "cpu")


def test_where_all_layers_look_at_windows_their_pages_stay() -> None:
    schema = cache_schema([WINDOW, WINDOW], PageFormat(16, F32))
    assert [(group.layers, group.reach) for group in schema.groups] == [((0, 1), None)]
    assert schema.reach is None and schema.group_of == ({"k": 0, "v": 0},) * 2


@pytest.mark.parametrize("window, reach", [(1, 0), (2, 1), (17, 1), (18, 2), (33, 2)])
def test_reach_of_the_widest_window(window: int, reach: int) -> None:
    """The number of pages before that a query in the first slot of its page reads."""
    narrow = LayerSchema((PageField("k", (4,), F32, window=1),))
    wide = LayerSchema((PageField("k", (4,), F32, window=window),))
    whole = LayerSchema((PageField("k", (4,), F32),))
    assert CacheSchema([narrow, whole, wide], 16).reach == reach


def test_a_layer_with_fields_that_stay_and_fields_under_a_window() -> None:
    both = LayerSchema((PageField("kept", (4,), F32), PageField("passing", (2, 2), F32, window=5)))
    schema = CacheSchema([both, LayerSchema((PageField("passing", (3,), F32, window=2),))], 4)
    assert schema.group_of == ({"kept": 0, "passing": 1}, {"passing": 1})
    found = [(group.layers, group.page_bytes, group.reach) for group in schema.groups]
    assert found == [((0,), 16, None), ((0, 1), 28, 1)]
    pools = CachePools(schema, PoolSizes((5, 3)), "cpu")
    shapes = [{name: x.shape for name, x in fields.items()} for fields in pools.pages]
    assert shapes == [{"kept": (5, 4), "passing": (3, 2, 2)}, {"passing": (3, 3)}]
    assert [len(list(pools.tensors(group))) for group in (0, 1)] == [1, 2]


def test_states_of_rows_and_snapshots_of_them() -> None:
    """Running rows come first, then the padding row, then snapshots."""
    paged = LayerSchema((PageField("k", (4,), F32),))
    schema = CacheSchema([STATE, paged, STATE], 16)
    assert schema.row_bytes == 2 * (2 * 3 * 4 + 5 * 2) and schema.has_rows
    assert schema.group_of == ({}, {"k": 0}, {})
    pools = CachePools(schema, PoolSizes((2,), rows=3, snapshots=2), "cpu")
    assert pools.num_states == 6 and pools.first_snapshot == 4
    assert pools.rows[0]["state"].shape == (6, 2, 3) and pools.rows[0]["tail"].dtype == BF16
    assert pools.rows[1] == {} and pools.pages[0] == {}
    held = [*pools.tensors(), *pools.states()]
    assert sum(math.prod(t.shape) * t.itemsize for t in held) == pools.nbytes
    for state in pools.states():
        state.copy_(torch.arange(6).view(-1, *[1] * (state.dim() - 1)).expand_as(state))
    pools.copy_states(torch.tensor([0, 2]), torch.tensor([5, 4]))
    for state in pools.states():
        assert state.flatten(1)[:, 0].tolist() == [0, 1, 2, 3, 2, 0]
        assert state.flatten(1)[:, -1].tolist() == [0, 1, 2, 3, 2, 0]


def test_without_states_rows_take_nothing() -> None:
    schema = cache_schema([DENSE], PageFormat(16, F32))
    pools = CachePools(schema, PoolSizes((2,), rows=300, snapshots=9), "cpu")
    assert not schema.has_rows and pools.num_states == 0
    assert list(pools.states()) == [] and pools.nbytes == 2 * schema.groups[0].page_bytes


def test_a_landmark_layer_needs_a_window() -> None:
    with pytest.raises(ValueError, match="window"):
        HilsSpec(
            num_heads=4, num_kv_heads=2, head_dim=8, rotary=None, topk=2, softmax1=True,
            summary="mean", bias_by_entropy=False,
        )  # fmt: skip


@pytest.mark.parametrize("num_pages", [10**12, 10**17])
def test_too_much_is_refused_with_the_bytes(num_pages: int) -> None:
    form = PageFormat(64, F32)
    with pytest.raises(OutOfMemory, match=str(num_pages * page_bytes([DENSE], form))):
        pools_of([DENSE], num_pages, form)


def test_other_failures_are_not_disguised() -> None:
    with pytest.raises(RuntimeError) as caught:
        pools_of([DENSE], 1, PageFormat(4, F32), "no such device")
    assert not isinstance(caught.value, OutOfMemory)
