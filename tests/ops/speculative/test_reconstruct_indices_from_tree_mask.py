"""reconstruct_indices_from_tree_mask against trees whose children are known."""

from __future__ import annotations

import random

import pytest
import torch

from cairn.errors import BadArgument
from cairn.ops import reconstruct_indices_from_tree_mask
from tests.ops.sampling.variants import runnable_on
from tests.ops.speculative.forest import Forest

VARIANTS = runnable_on(reconstruct_indices_from_tree_mask, "cpu")


def outputs(batch: int, nodes: int, flat: bool = True) -> list[torch.Tensor]:
    shapes = ((batch * nodes,) if flat else (batch, nodes), *((batch, nodes),) * 3)
    return [torch.full(shape, 99, dtype=torch.int64) for shape in shapes]


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("nodes, flat", [(1, True), (4, True), (4, False), (33, True)])
def test_a_forest_comes_back(nodes: int, flat: bool, name: str) -> None:
    forest = Forest.grow(3, nodes, random.Random(nodes))
    mask = torch.zeros(3, nodes, nodes, dtype=torch.bool)
    depth = torch.zeros(3, nodes, dtype=torch.int64)
    for b, tree in enumerate(forest.children):
        for node in range(nodes):
            mask[b, node, node] = True
            for child in tree[node]:
                mask[b, child] |= mask[b, node]
                depth[b, child] = depth[b, node] + 1
    lengths = torch.tensor([0, 17, 4000])
    written = outputs(3, nodes, flat)
    reconstruct_indices_from_tree_mask.using(name)(mask.flatten(), lengths, *written, 3, nodes)
    assert torch.equal(written[0].view(3, nodes), depth + lengths[:, None])
    for got, wanted in zip(written[1:], forest.tensors(), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("name", VARIANTS)
def test_of_bytes_any_but_0_is_true(name: str) -> None:
    mask = torch.tensor([[1, 0, 0], [2, 1, 0], [255, 128, 1]], dtype=torch.uint8).flatten()
    found = []
    for given in (mask, mask != 0):
        found.append(outputs(1, 3))
        reconstruct_indices_from_tree_mask.using(name)(given, torch.tensor([5]), *found[-1], 1, 3)
    assert [x.tolist() for x in found[0]] == [x.tolist() for x in found[1]]
    assert found[0][0].tolist() == [5, 6, 7]
    reconstruct_indices_from_tree_mask(mask, torch.tensor([5]), *outputs(1, 3), 1, 3)


def test_wrong_arguments_are_named() -> None:
    mask, lengths = torch.ones(18, dtype=torch.bool), torch.zeros(2, dtype=torch.int64)
    good = [mask, lengths, *outputs(2, 3), 2, 3]
    reconstruct_indices_from_tree_mask(*good)
    for position, wrong, named in (
        (0, mask[:17], "tree_mask"),
        (0, mask.int(), "tree_mask"),
        (1, lengths[:1], "verified_seq_len"),
        (2, good[2].int(), "positions"),
        (2, good[2].view(3, 2), "positions"),
        (4, good[4].T, "retrive_next_token"),
        (7, 0, "draft_token_num"),
    ):
        given = [*good[:position], wrong, *good[position + 1 :]]
        with pytest.raises(BadArgument, match=f"`{named}`"):
            reconstruct_indices_from_tree_mask(*given)
