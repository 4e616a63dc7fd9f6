"""Benchmark points of this family's ops, for `cairn bench ops`."""

from __future__ import annotations

from torch import Tensor

from cairn.ops.bench_points import Alternative, Draw, Point, Points, moved
from cairn.ops.speculative.build_tree_kernel_efficient import (
    DRAFT_MASK,
    build_tree_kernel_efficient,
)
from cairn.ops.speculative.cases import (
    _chains,
    _drafted,
    _drafts,
    _drawn,
    _segments,
    _trees,
)
from cairn.ops.speculative.reconstruct_indices_from_tree_mask import (
    reconstruct_indices_from_tree_mask,
)
from cairn.ops.speculative.segment_packbits import segment_packbits
from cairn.ops.speculative.tree_speculative_sampling_target_only import (
    tree_speculative_sampling_target_only,
)
from cairn.ops.speculative.verify_chains import verify_chains
from cairn.ops.speculative.verify_tree_greedy import verify_tree_greedy


@build_tree_kernel_efficient.bench
def _(draw: Draw) -> Points:
    for batch, _ in draw.logits():
        given = _drafted(draw, [1000] * batch, 4, 5, 32, DRAFT_MASK)
        tensors = [value for value in given.args if isinstance(value, Tensor)]
        others = draw.by_torch(build_tree_kernel_efficient.reference)
        yield Point(f"{batch} x 32 nodes", given, moved(*tensors), alternatives=others)


@reconstruct_indices_from_tree_mask.bench
def _(draw: Draw) -> Points:
    for batch, _ in draw.logits():
        given = _drawn(draw, batch, 16)
        tensors = [value for value in given.args if isinstance(value, Tensor)]
        others = draw.by_torch(reconstruct_indices_from_tree_mask.reference)
        yield Point(f"{batch} x 16 nodes", given, moved(*tensors), alternatives=others)


@segment_packbits.bench
def _(draw: Draw) -> Points:
    for batch, vocabulary in draw.logits():
        length = 16 * vocabulary
        given = _segments(draw, [length] * batch)
        # The reference implementation computes an index for every flag.
        plain = Alternative("definition", segment_packbits.reference)
        others = (plain,) if batch == 1 else ()
        size = f"{batch} x {length}"
        yield Point(size, given, moved(given.args[0], given.args[3]), alternatives=others)


@tree_speculative_sampling_target_only.bench
def _(draw: Draw) -> Points:
    for rows, vocabulary in draw.logits():
        batch = min(rows, 8)
        given = _drafts(draw, batch, 16, 4, vocabulary)
        law = given.args[-1][:, 0]
        others = (Alternative("definition", tree_speculative_sampling_target_only.reference),)
        size = f"{batch} x 16 nodes x {vocabulary}"
        yield Point(size, given, 2 * moved(law), alternatives=others)


@verify_chains.bench
def _(draw: Draw) -> Points:
    for batch, _ in draw.logits():
        given = _chains(draw, 8 * batch)
        tensors = [value for value in given.args if isinstance(value, Tensor)]
        others = draw.by_torch(verify_chains.reference)
        yield Point(f"{8 * batch}", given, moved(*tensors), alternatives=others)


@verify_tree_greedy.bench
def _(draw: Draw) -> Points:
    for batch, _ in draw.logits():
        given = _trees(draw, batch, 32, 6, 2)
        others = (Alternative("definition", verify_tree_greedy.reference),)
        yield Point(f"{batch} x 32 nodes", given, moved(*given.args), alternatives=others)
