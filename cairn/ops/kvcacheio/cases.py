"""Test cases of this family's ops."""

from __future__ import annotations

import torch

from cairn.ops.checks import INT64
from cairn.ops.kvcacheio.copy_slots import copy_slots
from cairn.ops.kvcacheio.ring_read import ring_read
from cairn.ops.kvcacheio.ring_write import ring_write
from cairn.ops.testing import Cases, Make


@copy_slots.cases
def _(make: Make) -> Cases:
    layers, heads, size, pages = 3, 2, 4, 5
    slots = size * pages
    source = make.tensor([19, 0, 7, 6, 13], dtype=torch.int64)
    target = make.tensor([1, 18, 2, 3, 12], dtype=torch.int64)
    for dtype in (torch.float32, torch.bfloat16):
        item = heads * 12 * dtype.itemsize
        dim = layers * item
        near = [make.randn(slots, heads, 12, dtype=dtype) for _ in range(4)]
        far = [make.randn(slots, layers, heads, 12, dtype=dtype) for _ in range(2)]
        first, head = [dim, 1, 1], [dim, size, heads]
        own = [item, 1, 1]
        yield make.args(source, target, *near, item, 1, 0, own, own)
        yield make.args(source, target, *near[:2], None, None, item, 1, 7, own, own)
        pairs = (far[0], near[0], far[1], near[1])
        for layout in (first, head):
            yield make.args(source, target, *pairs, item, 1, 2, layout, own)
            yield make.args(source, target, *pairs[::-1], item, 1, 1, own, layout)
        yield make.args(source[:0], target[:0], *near, item, 1, 0, own, own)
        padded = make.tensor([19, -1, 7, 6, -1], dtype=torch.int64)
        yield make.args(padded, target, *near, item, 1, 0, own, own)
        yield make.args(source, padded, *pairs, item, 1, 1, head, own)


@ring_read.cases
def _(make: Make) -> Cases:
    for count, (entries, lines, width) in ((0, (1, 3, 16)), (6, (4, 10, 48)), (9, (2, 1, 5000))):
        ring = make.randint(-(1 << 62), 1 << 62, entries, lines, width)
        target = make.empty(lines, width, dtype=torch.int64)
        taken = make.tensor([count], torch.int64)
        yield make.args(target, ring, taken)
        yield make.args(target[:2, :7], ring[:, :2, :7], taken)


@ring_write.cases
def _(make: Make) -> Cases:
    for count, (entries, width, numbers) in ((1, (1, 16, 16)), (7, (4, 48, 33)), (4, (4, 8, 0))):
        values = make.randint(-1, 1 << 40, numbers)
        ring = make.randint(0, 9, entries, width)
        taken = make.tensor([count], INT64[0])
        yield make.args(values, ring, taken)
        kept, place = make.randint(0, 9, numbers + 2), make.rand(numbers + 2).argsort()
        yield make.args(values, ring, taken, kept, place[:numbers])
