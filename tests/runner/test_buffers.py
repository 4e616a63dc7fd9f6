"""A step's tensors by name, and the padding after them that graphs read."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cairn.runner.buffers import StepArrays, StepBuffers, StepFields

CPU = torch.device("cpu")
GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)
NAMES = StepArrays._fields[:-1]


def arrays(slots: int, completed: int, groups: int, first: int = 0) -> StepArrays:
    """All values are distinct."""
    sizes = [slots] * 4 + [completed] * 2 + [slots] * groups
    ends = np.cumsum(sizes)
    numbers = np.arange(first, first + ends[-1])
    ids, position, row, slot, done, pages, *locations = np.split(numbers, ends[:-1])
    return StepArrays(ids, position, row, slot, done, pages, tuple(locations))


def test_fields_are_those_of_arrays():
    assert StepFields._fields == StepArrays._fields


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("groups", [0, 1, 2])
def test_sent_arrays_become_the_fields_of_their_names(groups, device):
    given = arrays(5, 2, groups)
    fields = StepFields.sent(given, torch.device(device))
    for name in NAMES:
        tensor, array = getattr(fields, name), getattr(given, name)
        assert tensor.dtype == torch.int64 and tensor.tolist() == array.tolist()
        assert tensor.device.type == device
    assert [part.tolist() for part in fields.locations] == [n.tolist() for n in given.locations]


def test_a_batch_has_the_fields_and_each_groups_place():
    fields = StepFields.sent(arrays(5, 2, 2), CPU)
    tables, watch = (torch.zeros(3, 4), torch.ones(3, 4)), torch.tensor([1])
    batch = fields.batch(tables, 77, watch)
    assert batch.input_ids is fields.ids and batch.positions is fields.position
    assert batch.row is fields.row and batch.slot is fields.slot
    assert batch.completed is fields.completed
    assert batch.completed_pages is fields.completed_pages
    assert batch.max_slot == 77 and batch.watch is watch
    for place, table, location in zip(batch.places, tables, fields.locations, strict=True):
        assert place.page_table is table and place.location is location
    assert fields.batch(tables, 77).watch is None
    with pytest.raises(ValueError):
        fields.batch(tables[:1], 77)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("groups", [0, 1, 2])
@pytest.mark.parametrize("slots, bucket", [(5, 8), (8, 8), (1, 16)])
def test_a_step_is_padded_to_its_bucket(slots, bucket, groups, device):
    """Padding runs in row 0 without a slot; it completes no page and writes to none."""
    spare, closing, done = (40, 80)[:groups], 4, min(2, slots)
    buffers = StepBuffers(16, spare, torch.device(device))
    # The old values are overwritten.
    buffers.write(arrays(16, 16, groups, first=1000), 16)
    given = arrays(slots, done, groups)
    buffers.write(given, bucket)
    fields = buffers.fields(bucket, closing)
    padding = {"ids": 0, "position": 0, "row": 0, "slot": -1}
    for name, behind in padding.items():
        wanted = [*getattr(given, name).tolist(), *[behind] * (bucket - slots)]
        assert getattr(fields, name).tolist() == wanted
    assert fields.completed.tolist() == [*given.completed.tolist(), *[0] * (closing - done)]
    pages = [*given.completed_pages.tolist(), *[-1] * (closing - done)]
    assert fields.completed_pages.tolist() == pages
    for tensor, array, location in zip(fields.locations, given.locations, spare, strict=True):
        assert tensor.tolist() == [*array.tolist(), *[location] * (bucket - slots)]
    buffers.write(None, bucket)
    assert fields.slot.tolist() == [-1] * bucket
    assert fields.completed_pages.tolist() == [-1] * closing
    assert [set(part.tolist()) for part in fields.locations] == [{n} for n in spare]


def test_buffers_have_fixed_addresses():
    buffers = StepBuffers(64, (9,), CPU)
    first = buffers.fields(32, 3)
    buffers.write(arrays(20, 1, 1), 32)
    again = buffers.fields(32, 3)
    for name in NAMES:
        assert getattr(first, name).data_ptr() == getattr(again, name).data_ptr()
    assert first.slot[:20].tolist() == arrays(20, 1, 1).slot.tolist()
    held = buffers.memory.untyped_storage().data_ptr()
    assert first.ids.untyped_storage().data_ptr() == held
    # The largest step fits.
    buffers.write(arrays(64, 64, 1), 64)
    assert buffers.fields(64, 64).completed_pages.tolist() == list(range(5 * 64, 6 * 64))
