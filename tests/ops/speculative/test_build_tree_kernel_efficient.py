"""build_tree_kernel_efficient against a simulated draft search."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from cairn.errors import BadArgument
from cairn.ops import build_tree_kernel_efficient
from tests.ops.sampling.variants import runnable_on

VARIANTS = runnable_on(build_tree_kernel_efficient, "cpu")


@dataclass
class Search:
    """A beam search of topk tokens a level, and the best n - 1 of all that it drafted."""

    parent_list: list[int]
    selected: list[int]
    parent: list[int]

    @classmethod
    def run(cls, topk: int, depth: int, nodes: int, rng: random.Random) -> Search:
        score = [rng.random() for _ in range(topk)]
        above = [-1] * topk
        parent_list, beam = [-1, *range(topk)], list(range(topk))
        for _ in range(depth - 1):
            begin = len(score)
            for token in beam:
                score += [score[token] * rng.random() for _ in range(topk)]
                above += [token] * topk
            beam = sorted(range(begin, len(score)), key=lambda d: -score[d])[:topk]
            parent_list += beam
        best = sorted(sorted(range(len(score)), key=lambda d: -score[d])[: nodes - 1])
        number = {-1: 0} | {drafted: 1 + place for place, drafted in enumerate(best)}
        width = topk * (depth - 1) + 1
        return cls(parent_list[:width], best, [-1, *(number[above[d]] for d in best)])

    def ancestors(self, node: int) -> set[int]:
        found = set()
        while node > 0:
            node = self.parent[node]
            found.add(node)
        return found

    def children(self, node: int) -> list[int]:
        return [child for child, parent in enumerate(self.parent) if parent == node]


def packed_bytes(nodes: int) -> int:
    return 1 if nodes <= 8 else 2 if nodes <= 16 else 4


def build(
    searches: list[Search],
    lengths: list[int],
    topk: int,
    depth: int,
    mode: int,
    name: str,
    flat: bool = True,
    flags: torch.dtype = torch.bool,
    listed: torch.dtype = torch.int64,
):
    """Outputs of the op: mask (flags, unless packed), positions, index, next_token, next_sibling;
    listed: dtype of the parents."""
    batch, nodes = len(searches), len(searches[0].parent)
    full = sum(length + nodes for length in lengths) * nodes
    if mode == 2:
        mask = torch.zeros(batch * nodes * packed_bytes(nodes), dtype=torch.uint8)
    else:
        mask = torch.ones(full if mode == 0 else batch * nodes * nodes, dtype=flags)
    tree = [torch.full((batch, nodes), -1) for _ in range(3)]
    positions = torch.full((batch * nodes,) if flat else (batch, nodes), 99)
    written = (mask, positions, *tree)
    build_tree_kernel_efficient.using(name)(
        torch.tensor([s.parent_list for s in searches], dtype=listed),
        torch.tensor([s.selected for s in searches], dtype=torch.int64).view(batch, nodes - 1),
        torch.tensor(lengths),
        *written,
        *(topk, depth, nodes, mode),
    )
    return written


def rows_of(mask: Tensor, lengths: list[int], nodes: int, mode: int) -> list[list[list[bool]]]:
    """The last n columns of every row of every request, whatever the mode."""
    if mode == 2:
        whole = 8 * packed_bytes(nodes)
        bits = [(byte >> bit) & 1 == 1 for byte in mask.tolist() for bit in range(8)]
        lines = [bits[at : at + nodes] for at in range(0, len(bits), whole)]
        return [lines[at : at + nodes] for at in range(0, len(lines), nodes)]
    found, begin = [], 0
    for length in lengths:
        width = nodes + (length if mode == 0 else 0)
        part = mask[begin : begin + width * nodes].view(nodes, width)
        assert bool(part[:, : width - nodes].all())
        found.append(part[:, width - nodes :].tolist())
        begin += width * nodes
    assert begin == mask.numel()
    return found


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize(
    "topk, depth, nodes", [(1, 3, 4), (2, 2, 6), (4, 4, 17), (8, 5, 32), (3, 1, 4), (5, 2, 1)]
)
def test_trees_of_a_search(topk: int, depth: int, nodes: int, mode: int, name: str) -> None:
    rng = random.Random(topk * 100 + nodes)
    searches = [Search.run(topk, depth, nodes, rng) for _ in range(3)]
    lengths = [0, 9, 130]
    mask, positions, index, next_token, next_sibling = build(
        searches, lengths, topk, depth, mode, name
    )
    assert index.flatten().tolist() == list(range(3 * nodes))
    rows = rows_of(mask, lengths, nodes, mode)
    for b, (search, length) in enumerate(zip(searches, lengths, strict=True)):
        for node in range(nodes):
            above = search.ancestors(node)
            assert positions[b * nodes + node] == length + len(above)
            assert {j for j in range(nodes) if rows[b][node][j]} == above | {node}
            walked, child = [], int(next_token[b, node])
            while child >= 0:
                walked.append(child)
                child = int(next_sibling[b, child])
            assert walked == search.children(node)


@pytest.mark.parametrize("name", VARIANTS)
def test_positions_may_lie_as_the_nodes_do(name: str) -> None:
    given = ([Search.run(2, 3, 5, random.Random(seed)) for seed in (0, 1)], [4, 70], 2, 3, 1, name)
    _, square, *_ = build(*given, flat=False)
    assert square.shape == (2, 5) and torch.equal(square.flatten(), build(*given)[1])


@pytest.mark.parametrize("name", VARIANTS)
def test_a_node_without_its_parent_has_no_links(name: str) -> None:
    # Expansion 1 has drafted token 7, which is not a node; 9 // 2 is beyond the list.
    search = Search([-1, 7, 0], [0, 2, 4, 9], [-1, 0, -1, 1, -1])
    mask, positions, _, next_token, next_sibling = build([search], [5], 2, 2, 1, name)
    assert next_token.tolist() == [[1, 3, -1, -1, -1]]
    assert next_sibling.tolist() == [[-1] * 5]
    assert positions.tolist() == [5, 6, 6, 7, 6]
    assert mask.view(5, 5)[2].tolist() == [True, False, True, False, False]


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("mode", [1, 2])
def test_a_longer_mask_is_left_alone_behind_its_rows(mode: int, name: str) -> None:
    search = Search.run(3, 3, 6, random.Random(2))
    dtype = torch.bool if mode == 1 else torch.uint8
    size = 36 if mode == 1 else 6
    exact, *_ = build([search], [3], 3, 3, mode, name)
    mask = torch.ones(size + 5, dtype=dtype)
    build_tree_kernel_efficient.using(name)(
        *(torch.tensor([search.parent_list]), torch.tensor([search.selected]), torch.tensor([3])),
        *(mask, torch.empty(6, dtype=torch.int64)),
        *(torch.full((1, 6), -1) for _ in range(3)),
        *(3, 3, 6, mode),
    )
    assert torch.equal(mask[:size], exact) and bool((mask[size:] == 1).all())


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("mode", [0, 1])
def test_masks_of_bytes_hold_ones_and_zeros(mode: int, name: str) -> None:
    given = ([Search.run(2, 3, 5, random.Random(seed)) for seed in (0, 1)], [4, 70], 2, 3, mode)
    written = build(*given, name, flags=torch.uint8)
    assert written[0].dtype == torch.uint8
    for got, wanted in zip(written, build(*given, name), strict=True):
        assert torch.equal(got, wanted.to(got.dtype))


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_trees_of_one_level_need_no_parents(dtype: torch.dtype, name: str) -> None:
    search = Search.run(3, 1, 4, random.Random(5))
    given = ([search, search], [5, 2], 3, 1, 1, name)
    expected = build(*given)
    search.parent_list = []
    assert expected[3].tolist() == [[1, -1, -1, -1]] * 2
    for got, wanted in zip(build(*given, listed=dtype), expected, strict=True):
        assert torch.equal(got, wanted)


def test_sglang_asks_for_one_level_like_this() -> None:
    tree = [torch.full((2, 4), -1) for _ in range(3)]
    build_tree_kernel_efficient(
        *(torch.empty(2, 0), torch.tensor([[0, 1, 2]] * 2), torch.tensor([5, 2])),
        *(torch.ones(32, dtype=torch.uint8), torch.empty(8, dtype=torch.int64)),
        *(*tree, 3, 1, 4, 1),
    )
    assert tree[1].tolist() == [[1, -1, -1, -1]] * 2
    assert tree[2].tolist() == [[-1, 2, 3, -1]] * 2


def test_wide_packed_types_are_taken() -> None:
    search = Search.run(4, 3, 12, random.Random(0))
    plain, *_ = build([search], [3], 4, 3, 2, "reference")
    wide = torch.zeros(12, dtype=torch.uint16)
    tree = [torch.full((1, 12), -1) for _ in range(3)]
    build_tree_kernel_efficient(
        *(torch.tensor([search.parent_list]), torch.tensor([search.selected]), torch.tensor([3])),
        *(wide, torch.empty(12, dtype=torch.int64), *tree, 4, 3, 12, 2),
    )
    assert torch.equal(wide.view(torch.uint8), plain)


@pytest.mark.parametrize(
    "position, wrong, named",
    [
        (0, torch.zeros(1, 4, dtype=torch.int64), "parent_list"),
        (0, torch.zeros(1, 3), "parent_list"),
        (0, torch.zeros(1, 0), "parent_list"),
        (1, torch.zeros(1, 4, dtype=torch.int32), "selected_index"),
        (2, torch.zeros(2, dtype=torch.int64), "verified_seq_len"),
        (3, torch.ones(7, dtype=torch.bool), "tree_mask"),
        (3, torch.ones(25, dtype=torch.int8), "tree_mask"),
        (4, torch.zeros(4, dtype=torch.int64), "positions"),
        (4, torch.zeros(5, 1, dtype=torch.int64), "positions"),
        (6, torch.zeros(5, 1, dtype=torch.int64).T[:, ::2], "retrive_next_token"),
        (8, 0, "topk"),
        (11, 3, "tree_mask_mode"),
    ],
)
def test_wrong_arguments_are_named(position: int, wrong: object, named: str) -> None:
    long = torch.int64
    given: list[object] = [
        *(torch.zeros(1, 3, dtype=long), torch.zeros(1, 4, dtype=long), torch.zeros(1, dtype=long)),
        *(torch.ones(25, dtype=torch.bool), torch.zeros(5, dtype=long)),
        *(torch.full((1, 5), -1) for _ in range(3)),
        *(2, 2, 5, 1),
    ]
    build_tree_kernel_efficient(*given)
    given[position] = wrong
    with pytest.raises(BadArgument, match=f"`{named}`"):
        build_tree_kernel_efficient(*given)
