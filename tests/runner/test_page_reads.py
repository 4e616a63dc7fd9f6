"""Pages counted by slots, against a count query by query."""

from __future__ import annotations

import random

import numpy as np
import pytest

from cairn.attention.base import AttentionLayer, LandmarkRule
from cairn.cache.landmarks import SlotMap
from cairn.runner.runner import STEPS_COUNTED_AT_ONCE, PageReads

PAGE = 4


def layer(index: int, window: int, topk: int, kv_heads: int) -> AttentionLayer:
    rule = LandmarkRule(topk, window, softmax1=True, summary="prior", bias=True)
    return AttentionLayer(index, "hsa", 4, kv_heads, 8, landmark=rule)


def counted(reads: PageReads) -> tuple[int, int, int, int]:
    return reads.queries, reads.window, reads.held, reads.selected


@pytest.mark.parametrize("steps", [1, 5, 2 * STEPS_COUNTED_AT_ONCE + 3])
def test_against_a_count_query_by_query(steps):
    rng = random.Random(steps)
    layers = [layer(0, 8, 2, 1), layer(1, 8, 2, 1), layer(2, 16, 3, 2)]
    reads = PageReads(layers, SlotMap(PAGE, True))
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
                rule = one.landmark
                pages = set(range(slot // PAGE + 1))
                # The window is aligned down to the start of a page.
                under = {p for p in pages if (p + 1) * PAGE > slot - rule.window + 1}
                queries += 1
                held += len(pages)
                window += len(under)
                selected += min(len(pages - under), rule.topk) * one.num_kv_heads
        if rng.random() < 0.1:
            assert counted(reads) == (queries, window, held, selected)
    assert counted(reads) == (queries, window, held, selected)
