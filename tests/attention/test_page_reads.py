"""Counts of read pages by slot ranges, compared with a count per query."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from cairn.attention.page_reads import STEPS_COUNTED_AT_ONCE, PageReads
from cairn.cache.landmarks import SlotMap
from cairn.specs.gqa import GqaSpec
from cairn.specs.hils import HilsSpec

PAGE = 4


def selecting(window: int, topk: int, kv_heads: int) -> HilsSpec:
    return HilsSpec(
        num_heads=4, num_kv_heads=kv_heads, head_dim=8, rotary=None, window=window, topk=topk,
        softmax1=True, summary="prior", bias_by_entropy=True,
    )  # fmt: skip


def counted(reads: PageReads) -> tuple[int, int, int, int]:
    return reads.queries, reads.window, reads.held, reads.selected


@pytest.mark.parametrize("steps", [1, 5, 2 * STEPS_COUNTED_AT_ONCE + 3])
def test_against_a_count_query_by_query(steps):
    rng = random.Random(steps)
    layers = [selecting(8, 2, 1), selecting(8, 2, 1), selecting(16, 3, 2)]
    # Other mixers select nothing, and neither does a landmark layer that is computed as a window.
    others = [
        GqaSpec(num_heads=4, num_kv_heads=2, head_dim=8, rotary=None),
        replace(layers[2], backend="window"),
    ]
    reads = PageReads([*layers, *others], SlotMap(PAGE, True))
    queries = window = held = selected = 0
    for _ in range(steps):
        slots = [rng.randrange(100) for _ in range(rng.randint(1, 9))]
        if rng.random() < 0.5:
            reads.add(np.array(slots))
        else:
            tokens, slots = slots, []
            reads.add_decoding(np.array(tokens))
            for token in tokens:
                slot = token + token // (PAGE - 1)
                slots += [slot, slot + 1] if slot % PAGE == PAGE - 2 else [slot]
        for slot in slots:
            for one in layers:
                pages = set(range(slot // PAGE + 1))
                # The window starts at a page border.
                under = {p for p in pages if (p + 1) * PAGE > slot - one.local_window + 1}
                queries += 1
                held += len(pages)
                window += len(under)
                selected += min(len(pages - under), one.topk) * one.num_kv_heads
        if rng.random() < 0.1:
            assert counted(reads) == (queries, window, held, selected)
    assert counted(reads) == (queries, window, held, selected)
