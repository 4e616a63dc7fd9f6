"""Test cases of this family's ops."""

from __future__ import annotations

import torch

from cairn.ops.speculative.build_tree_kernel_efficient import (
    DRAFT_MASK,
    FULL_MASK,
    PACKED_MASK,
    build_tree_kernel_efficient,
    row_bytes,
)
from cairn.ops.speculative.reconstruct_indices_from_tree_mask import (
    reconstruct_indices_from_tree_mask,
)
from cairn.ops.speculative.segment_packbits import segment_packbits
from cairn.ops.speculative.tree_speculative_sampling_target_only import (
    tree_speculative_sampling_target_only,
)
from cairn.ops.speculative.trees import random_tree
from cairn.ops.speculative.verify_chains import verify_chains
from cairn.ops.speculative.verify_tree_greedy import verify_tree_greedy
from cairn.ops.testing import Arguments, Cases, Make


def _drafted(
    make: Make, lengths: list[int], topk: int, depth: int, nodes: int, mode: int
) -> Arguments:
    """Arguments for trees drawn at random, parents among the nodes or not."""
    batch, total = len(lengths), topk + topk * topk * (depth - 1)
    nodes = min(nodes, total + 1)
    drawn = [make.rand(total).argsort()[: nodes - 1].sort().values for _ in lengths]
    selected = torch.stack(drawn) if drawn else make.randint(0, 1, 0, nodes - 1)
    parents = make.randint(0, total, batch, topk * (depth - 1) + 1)
    if nodes > 1:
        among = selected.gather(1, make.randint(0, nodes - 1, *parents.shape))
        parents = torch.where(make.rand(*parents.shape) < 0.8, among, parents)
    size = {FULL_MASK: sum(n + nodes for n in lengths), DRAFT_MASK: batch * nodes}
    if mode == PACKED_MASK:
        mask = make.full((batch * nodes * row_bytes(nodes),), 255, torch.uint8)
    else:
        mask = make.full((size[mode] * nodes,), 1, torch.bool)
    tree = (make.full((batch, nodes), -1, torch.int64) for _ in range(3))
    return make.args(
        parents,
        selected,
        make.tensor(lengths, torch.int64),
        mask,
        make.empty(batch * nodes, dtype=torch.int64),
        *tree,
        topk,
        depth,
        nodes,
        mode,
    )


@build_tree_kernel_efficient.cases
def _(make: Make) -> Cases:
    for mode in (FULL_MASK, DRAFT_MASK, PACKED_MASK):
        yield _drafted(make, [5], 2, 2, 4, mode)
        yield _drafted(make, [7, 1, 100], 4, 3, 13, mode)
        yield _drafted(make, [0, 63], 8, 4, 32, mode)
        yield _drafted(make, [9, 3], 1, 1, 2, mode)
        yield _drafted(make, [9, 3], 3, 1, 1, mode)
        yield _drafted(make, [], 2, 3, 7, mode)
    yield _drafted(make, [11, 2], 10, 5, 64, DRAFT_MASK)
    yield _drafted(make, [1], 10, 8, 100, FULL_MASK)


def _drawn(make: Make, batch: int, nodes: int) -> Arguments:
    """Masks of random trees."""
    mask = torch.zeros(batch, nodes, nodes, dtype=torch.bool)
    for tree in mask:
        for node in range(nodes):
            if node:
                tree[node] = tree[int(make.randint(0, node, 1))]
            tree[node, node] = True
    lengths = make.randint(0, 1000, batch)
    return make.args(
        mask.flatten().to(make.device),
        lengths,
        make.empty(batch * nodes, dtype=torch.int64),
        *(make.empty(batch, nodes, dtype=torch.int64) for _ in range(3)),
        batch,
        nodes,
    )


@reconstruct_indices_from_tree_mask.cases
def _(make: Make) -> Cases:
    for batch, nodes in ((1, 1), (3, 7), (2, 63), (1, 100), (0, 4)):
        yield _drawn(make, batch, nodes)
    given = list(_drawn(make, 4, 9).args)
    given[0] = make.rand(given[0].numel()) < 0.3
    yield make.args(*given)


def _segments(make: Make, lengths: list[int], slack: int = 0) -> Arguments:
    """Segments of these lengths, with unused bytes between them."""
    begin, out = [0], [0]
    for length in lengths:
        begin.append(begin[-1] + length)
        out.append(out[-1] + -(-length // 8) + slack)
    flags = make.rand(begin[-1]) < 0.5
    indptr = (make.tensor(x, torch.int32) for x in (begin, out))
    return make.args(flags, *indptr, make.full((out[-1],), 170, torch.uint8), len(lengths))


@segment_packbits.cases
def _(make: Make) -> Cases:
    yield _segments(make, [1])
    yield _segments(make, [7, 8, 9, 0, 63, 1], 2)
    yield _segments(make, [0, 0, 5, 1000, 0])
    yield _segments(make, [10000, 3, 9000])
    yield _segments(make, [])
    yield _segments(make, [0])


def _drafts(make: Make, batch: int, nodes: int, accepted: int, tokens: int) -> Arguments:
    """Random trees of tokens that the target often accepts."""
    law = make.probs(batch * nodes, tokens, 2.0).view(batch, nodes, tokens)
    return make.args(
        make.full((batch * nodes,), -7, torch.int32),
        make.full((batch, accepted), -1, torch.int32),
        make.empty(batch, dtype=torch.int32),
        make.randint(0, min(tokens, 40), batch, nodes),
        *random_tree(make, batch, nodes),
        make.rand(batch, nodes),
        make.rand(batch),
        law,
        make.full(law.shape, 0.0),
    )


@tree_speculative_sampling_target_only.cases
def _(make: Make) -> Cases:
    yield _drafts(make, 1, 1, 1, 9)
    yield _drafts(make, 4, 7, 4, 5)
    yield _drafts(make, 6, 16, 5, 301)
    given = _drafts(make, 3, 9, 3, 5000).args
    yield make.args(*given, threshold_single=0.01, threshold_acc=0.3)
    yield make.args(*given, threshold_acc=0.0)
    given = _drafts(make, 3, 9, 5, 7).args
    yield make.args(*given[:-1], given[-2] * 0.9, deterministic=False)
    yield make.args(*given[:-1], given[-2].clone())
    yield _drafts(make, 0, 5, 2, 9)


def _trees(make: Make, batch: int, nodes: int, accepted: int, tokens: int) -> Arguments:
    """Random trees over so few tokens that paths grow long."""
    candidates, target = (make.randint(0, tokens, batch, nodes) for _ in range(2))
    return make.args(
        make.full((batch * nodes,), -7, torch.int32),
        make.full((batch, accepted), -1, torch.int32),
        make.empty(batch, dtype=torch.int32),
        candidates,
        *random_tree(make, batch, nodes),
        target,
    )


@verify_tree_greedy.cases
def _(make: Make) -> Cases:
    yield _trees(make, 1, 1, 1, 3)
    yield _trees(make, 3, 7, 4, 2)
    yield _trees(make, 8, 63, 9, 2)
    yield _trees(make, 2, 100, 3, 1)
    yield _trees(make, 5, 16, 1, 2)
    yield _trees(make, 0, 5, 2, 2)


def _chains(make: Make, entries: int) -> Arguments:
    """Chains of random lengths, over so few tokens that drafts are often right."""
    given, tokens = make.randint(-3, 6, entries) % 4 - 2, make.randint(-1, 2, entries)
    given = torch.where(given >= 0, given, -1 - make.randint(0, 9, entries))
    return make.args(tokens, given, make.arange(entries), 1 << 40)


@verify_chains.cases
def _(make: Make) -> Cases:
    for entries in (1, 9, 70, 0):
        yield _chains(make, entries)
    tokens = make.randint(0, 99, 5)
    # All guesses right, and one wrong; a first entry begins a chain whatever its value.
    yield make.args(tokens, torch.cat((tokens[:1], tokens[:-1])), make.arange(5), 7)
    yield make.args(tokens, tokens.roll(1) + make.tensor([0, 0, 0, 1, 0], torch.int64), tokens, 7)
