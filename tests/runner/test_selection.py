"""From the tensors of landmark layers to the user's selection report."""

from __future__ import annotations

import pytest
import torch

from cairn.attention.base import LayerReads
from cairn.runner.selection import selections
from cairn.types import MAX_SELECTED_PAGES, LayerSelection


def reads(pages, weights, window, layer=3) -> LayerReads:
    return LayerReads(
        layer,
        torch.tensor(pages, dtype=torch.int32),
        torch.tensor(weights, dtype=torch.float32),
        torch.tensor(window, dtype=torch.float32),
    )


def test_a_page_that_two_kv_heads_chose_is_reported_once():
    """One query, 2 KV heads of 2 query heads each: weights are averages over all four heads."""
    pages = [[[1, 4, -1], [0, 4, 7]]]
    weights = [[[0.2, 0.4, 0.0], [0.0, 0.4, 0.0], [0.1, 0.0, 0.3], [0.1, 0.2, 0.3]]]
    (((found,),),) = (selections([reads(pages, weights, [[0.4, 0.6, 0.2, 0.0]])], 1),)
    assert found.layer == 3
    assert found.pages == (4, 7, 0, 1)
    assert found.weights == pytest.approx((0.25, 0.15, 0.05, 0.05))
    assert found.window == pytest.approx(0.3)


def test_every_query_has_every_layer_in_order():
    one = [reads([[[2]], [[5]]], [[[0.5]], [[1.0]]], [[0.5], [0.0]], layer) for layer in (0, 6)]
    found = selections(one, 2)
    assert found == [
        tuple(LayerSelection(layer, (2,), (0.5,), 0.5) for layer in (0, 6)),
        tuple(LayerSelection(layer, (5,), (1.0,), 0.0) for layer in (0, 6)),
    ]


def test_a_page_whose_weight_is_zero_was_read_all_the_same():
    ((found,),) = selections([reads([[[0, 3]]], [[[0.0, 0.25]]], [[0.75]])], 1)
    assert (found.pages, found.weights) == ((3, 0), (0.25, 0.0))


def test_nothing_selected():
    ((found,),) = selections([reads([[[-1, -1]]], [[[0.0, 0.0]]], [[1.0]])], 1)
    assert found == LayerSelection(3, (), (), 1.0)
    ((found,),) = selections([reads([[[]]], [[[]]], [[1.0]])], 1)
    assert found == LayerSelection(3, (), (), 1.0)


def test_the_heaviest_pages_are_kept():
    pages = torch.arange(100, dtype=torch.int32).view(1, 1, 100)
    weights = torch.rand(1, 1, 100, generator=torch.Generator().manual_seed(0)) / 100
    ((found,),) = selections([LayerReads(0, pages, weights, torch.zeros(1, 1))], 1)
    order = weights[0, 0].argsort(descending=True).tolist()
    assert len(found.pages) == MAX_SELECTED_PAGES
    assert list(found.pages) == order[:MAX_SELECTED_PAGES]
    assert sorted(found.weights, reverse=True) == list(found.weights)


def test_no_watched_queries():
    assert selections([], 0) == []
