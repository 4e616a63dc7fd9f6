"""verify_tree_greedy against the longest matching path of a tree, and sgl-kernel's example."""

from __future__ import annotations

import random

import pytest
import torch

from cairn import ops
from cairn.errors import BadArgument
from cairn.ops import verify_tree_greedy
from tests.ops.sampling.variants import runnable_on
from tests.ops.speculative.forest import CIRCLES, Forest

VARIANTS = runnable_on(verify_tree_greedy, "cpu")


def verify(forest: Forest, tokens, target, longest: int, name: str):
    batch, nodes = len(forest.children), len(forest.children[0])
    predicts = torch.full((batch * nodes,), -5, dtype=torch.int32)
    accept_index = torch.full((batch, longest), -1, dtype=torch.int32)
    accepted = torch.empty(batch, dtype=torch.int32)
    verify_tree_greedy.using(name)(
        *(predicts, accept_index, accepted, torch.tensor(tokens), *forest.tensors()),
        torch.tensor(target),
    )
    return predicts.tolist(), accept_index.tolist(), accepted.tolist()


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("seed", range(3))
def test_the_path_of_the_target(seed: int, name: str) -> None:
    rng = random.Random(seed)
    batch, nodes, longest = 4, (3, 12, 31)[seed], (2, 9, 4)[seed]
    forest = Forest.grow(batch, nodes, rng)
    tokens = [[rng.randrange(3) for _ in range(nodes)] for _ in range(batch)]
    target = [[rng.randrange(3) for _ in range(nodes)] for _ in range(batch)]
    predicts, accept_index, accepted = verify(forest, tokens, target, longest, name)
    for b in range(batch):
        node, path = 0, [0]
        while len(path) < longest:
            fitting = [c for c in forest.children[b][node] if tokens[b][c] == target[b][node]]
            if not fitting:
                break
            node = fitting[0]
            path.append(node)
        assert accepted[b] == len(path) - 1
        flat = [b * nodes + n for n in path]
        assert accept_index[b] == flat + [-1] * (longest - len(path))
        for n in range(nodes):
            expected = target[b][n] if n in path else -5
            assert predicts[b * nodes + n] == expected


@pytest.mark.parametrize("name", VARIANTS)
def test_two_requests_by_hand(name: str) -> None:
    forest = Forest([[[1, 2], [3], [], [4], []], [[1], [2], [3], [4], []]])
    tokens = [[7, 1, 2, 3, 9], [7, 1, 2, 3, 4]]
    target = [[1, 3, 0, 5, 6], [1, 2, 0, 4, 9]]
    predicts, accept_index, accepted = verify(forest, tokens, target, 4, name)
    assert accepted == [2, 2]
    assert accept_index == [[0, 1, 3, -1], [5, 6, 7, -1]]
    assert predicts == [1, 3, -5, 5, -5, 1, 2, 0, -5, -5]


@pytest.mark.parametrize("name", VARIANTS)
def test_links_in_a_circle_end_the_walk(name: str) -> None:
    # No sibling fits; and nodes that fit.
    predicts = torch.full((8,), -5, dtype=torch.int32)
    accept_index = torch.full((2, 9), -1, dtype=torch.int32)
    accepted = torch.empty(2, dtype=torch.int32)
    tokens, target = torch.ones(2, 4, dtype=torch.int64), torch.tensor([[7] * 4, [1] * 4])
    verify_tree_greedy.using(name)(*(predicts, accept_index, accepted, tokens, *CIRCLES, target))
    assert accepted.tolist() == [0, 3]
    assert accept_index[:, :5].tolist() == [[0, -1, -1, -1, -1], [4, 5, 6, 5, -1]]
    assert predicts.tolist() == [7, -5, -5, -5, 1, 1, 1, -5]


def test_wrong_arguments_are_named() -> None:
    forest = Forest.grow(2, 5, random.Random(0))
    predicts, accept_index = torch.zeros(10, dtype=torch.int32), torch.zeros(2, 3).int()
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    accepted = torch.zeros(2, dtype=torch.int32)
    tree = forest.tensors()
    for given, named in (
        ((predicts[:9], accept_index, accepted, tokens, *tree, tokens), "predicts"),
        ((predicts, accept_index.long(), accepted, tokens, *tree, tokens), "accept_index"),
        ((predicts, accept_index, accepted, tokens, *tree, tokens.T), "target_predict"),
        ((predicts, accept_index[:, :0], accepted, tokens, *tree, tokens), "accept_index"),
        ((predicts, accept_index, accepted, tokens[:, :0], *tree, tokens), "candidates"),
        ((predicts, accept_index, accepted, tokens[0], *tree, tokens), "candidates"),
        ((predicts, accept_index, accepted, tokens, tree[0].int(), *tree[1:], tokens), "retrive"),
    ):
        with pytest.raises(BadArgument, match=f"`{named}"):
            verify_tree_greedy(*given)


@pytest.mark.parametrize(
    "place, number",
    [(4, 10), (4, -1), (5, 5), (6, 99)],
)
def test_links_to_no_node_are_refused_by_name(place: int, number: int) -> None:
    forest, tokens = Forest.grow(2, 5, random.Random(0)), torch.zeros(2, 5, dtype=torch.int64)
    written = (torch.full((10,), -5).int(), torch.full((2, 3), -5).int(), torch.full((2,), -5))
    given = [*written[:2], written[2].int(), tokens, *forest.tensors(), tokens]
    given[place][1, 4] = number
    name = ("retrive_index", "retrive_next_token", "retrive_next_sibling")[place - 4]
    with pytest.raises(BadArgument, match=f"`{name}` holds {number}, not "):
        verify_tree_greedy(*given)
    assert all(bool((x == -5).all()) for x in given[:3])


@pytest.mark.parametrize("name", VARIANTS)
def test_nodes_that_no_link_leads_to_may_hold_anything(name: str) -> None:
    """A tree of two nodes with room for four; any negative number ends a path."""
    index, links = torch.tensor([[0, 1, -1, 99]]), torch.tensor([[1, -7, -1, -1]])
    written = torch.zeros(4).int(), torch.full((1, 4), -5).int(), torch.zeros(1).int()
    tokens, wanted = torch.tensor([[3, 4, -1, -1]]), torch.tensor([[4, 6, 0, 0]])
    none = torch.full_like(links, -2)
    verify_tree_greedy.using(name)(*written, tokens, index, links, none, wanted)
    assert written[0].tolist() == [4, 6, 0, 0]
    assert written[1].tolist() == [[0, 1, -5, -5]]
    assert written[2].tolist() == [1]


def test_both_names_of_the_tree() -> None:
    forest = Forest.grow(1, 5, random.Random(1))
    names = ("index", "next_token", "next_sibling")
    tokens, outcomes = torch.zeros(1, 5, dtype=torch.int64), []
    for prefix in ("retrive", "retrieve"):
        tree = {f"{prefix}_{n}": x for n, x in zip(names, forest.tensors(), strict=True)}
        written = (torch.zeros(5).int(), torch.full((1, 3), -1).int(), torch.zeros(1).int())
        verify_tree_greedy(*written, candidates=tokens, target_predict=tokens, **tree)
        outcomes.append([x.tolist() for x in written])
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][2] != [0]


def test_the_module_has_the_functions_by_the_names_that_peers_have_there() -> None:
    module = ops.speculative
    peers = {name for name in vars(ops) if "tree" in name or "packbits" in name}
    assert {*peers, "verify_chains"} == set(module.__all__)
    assert all(getattr(module, name) is getattr(ops, name) for name in module.__all__)
