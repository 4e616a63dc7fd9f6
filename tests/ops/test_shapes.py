"""Attention and landmark ops on the shapes of real models, each kernel against its definition.

Head widths of 32 to 256, 1 to 16 query heads a KV head, pages of 16 to 128 slots, in every dtype:
kernels are compiled anew for each, so the op's own cases stay small and this is for a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from cairn import ops
from cairn.ops.registry import Implementation, Op, all_ops
from cairn.ops.testing import Arguments, Make, Paged, check, runnable

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Shape:
    """Attention geometry of a model: head dim, KV heads, group size, page size."""

    dim: int
    kv_heads: int
    group: int
    size: int
    dtype: torch.dtype

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"d{self.dim}-{self.kv_heads}x{self.group}-p{self.size}-{kind}"


# Every head dim, group size, page size and dtype in combination with several others.
SHAPES = [
    Shape(32, 4, 1, 16, F32),
    Shape(32, 1, 16, 64, BF16),
    Shape(32, 2, 8, 128, F16),
    Shape(64, 2, 4, 16, BF16),
    Shape(64, 1, 16, 32, F32),
    Shape(64, 1, 8, 64, F32),
    Shape(64, 3, 1, 128, BF16),
    Shape(64, 1, 5, 64, F16),
    Shape(80, 2, 4, 32, BF16),
    Shape(80, 1, 2, 64, F32),
    Shape(128, 1, 8, 64, BF16),
    Shape(128, 2, 2, 16, F16),
    Shape(128, 1, 16, 128, F32),
    Shape(256, 1, 4, 64, BF16),
    Shape(256, 1, 1, 32, F32),
    Shape(256, 1, 16, 16, F16),
]
STEPS = {"decode": (1, 2, 0, 1), "prefill": (290, 1, 0, 17)}
"""Tokens of each of four rows: for the kernels for few tokens and for many."""


@dataclass(frozen=True)
class Step:
    """A step over a poisoned paged cache of four rows."""

    shape: Shape
    make: Make
    paged: Paged
    row: Tensor
    slot: Tensor

    @property
    def where(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.row, self.slot, self.paged.page_table

    @property
    def caches(self) -> tuple[Tensor, Tensor]:
        return self.paged.k_cache, self.paged.v_cache

    @property
    def without_landmarks(self) -> tuple[Tensor, Tensor]:
        """The caches with NaN in the last slot of every page."""
        k, v = (cache.clone() for cache in self.caches)
        k[:, :, -1] = v[:, :, -1] = torch.nan
        return k, v

    def heads(self, scale: float = 1.0) -> Tensor:
        """Random queries [T, h_q, d]."""
        own = self.shape
        count = own.kv_heads * own.group
        return self.make.randn(self.row.numel(), count, own.dim, dtype=own.dtype, scale=scale)

    def whole(self, low: int, high: int, *shape: int) -> Tensor:
        """Random integers, so that rounding cannot change the order of sums."""
        return self.make.randint(low, high, *shape).to(self.shape.dtype)


def step_of(shape: Shape, kind: str) -> Step:
    make = Make("cuda")
    size = shape.size
    paged = make.paged(
        (9 * size + 300, 2, 5, 30 * size), shape.kv_heads, size, shape.dim, dtype=shape.dtype
    )
    row, slot, _ = paged.queries(STEPS[kind])
    return Step(shape, make, paged, row, slot)


def window_cases(step: Step) -> Iterator[Arguments]:
    q, window = step.heads(), 2 * step.shape.size + 1
    masked = (q, *step.without_landmarks, *step.where, window)
    yield Arguments(masked, {"aligned": True, "mask_landmarks": True})
    yield Arguments((q, *step.caches, *step.where, 100))


def dense_cases(step: Step) -> Iterator[Arguments]:
    q = step.heads()
    yield Arguments((q, *step.caches, *step.where))
    yield Arguments((q, *step.without_landmarks, *step.where), {"mask_landmarks": True})


def summaries(step: Step) -> tuple[Tensor, Tensor, Tensor]:
    """lmk_q, summary_key and summary_bias of the pools' pages."""
    own, pages = step.shape, step.paged.k_cache.shape[0]
    heads = own.kv_heads * own.group
    z = step.whole(-3, 4, step.row.numel(), heads, own.dim)
    key = step.whole(-2, 3, pages, heads, own.dim)
    return z, key, step.make.randint(0, 5, pages, heads).float() / 4


def landmark_cases(step: Step) -> Iterator[Arguments]:
    z, key, bias = summaries(step)
    where = (*step.where, 2 * step.shape.size + 1, 8, True)
    q, caches = step.heads(), step.without_landmarks
    # A power of two: the scale rounds no score.
    yield Arguments((q, z, *caches, key, bias, *where), {"scale": 0.125})
    shared = key[:, : step.shape.kv_heads].contiguous()
    yield Arguments((q, z, *caches, shared, None, *where), {"scale": 0.125})
    if step.row.numel() <= len(step.paged.lengths):
        # The page becomes complete; in a long step its summary is a candidate, with rounding.
        stored = {"scale": 0.125, "store_summaries": True}
        yield Arguments((q, z, *caches, key, bias, *where), stored)


def select_cases(step: Step) -> Iterator[Arguments]:
    z, key, bias = summaries(step)
    size, groups = step.shape.size, step.shape.kv_heads
    lse = step.make.randn(step.row.numel(), z.shape[1])
    where = (*step.where, size, 2 * size + 1)
    for topk in (8, 64):
        given = (z, key, bias, lse, *where, topk, 0.125)
        yield Arguments(given, {"num_kv_heads": groups})


def page_cases(step: Step) -> Iterator[Arguments]:
    topk, groups = 8, step.shape.kv_heads
    tokens, below = step.row.numel(), (step.slot // step.shape.size)[:, None, None]
    drawn = step.make.rand(tokens, groups, 64)
    page = torch.arange(64, device=drawn.device)
    order = drawn.masked_fill(page >= below, 2.0).argsort(-1)[..., :topk]
    chosen = order.masked_fill(order >= below, 1 << 20).sort(-1).values
    indices = torch.where(chosen < 1 << 20, chosen, -1).to(torch.int32)
    weights = step.make.rand(tokens, groups * step.shape.group, topk)
    where = (step.row, step.paged.page_table, indices, weights)
    yield Arguments((step.heads(), *step.without_landmarks, *where))


def complete_pages(step: Step) -> Tensor:
    size, table = step.shape.size, step.paged.page_table
    found = [table[r, : n // size] for r, n in enumerate(step.paged.lengths)]
    return torch.cat(found).long()[:20]


def prior_cases(step: Step) -> Iterator[Arguments]:
    pages, own = complete_pages(step), step.shape
    heads = own.kv_heads * own.group
    query = step.make.randn(pages.numel(), heads, own.dim, dtype=own.dtype, scale=3.0)
    yield Arguments((query, step.paged.k_cache, pages))


def store_cases(step: Step) -> Iterator[Arguments]:
    for given in prior_cases(step):
        query, cache, pages = given.args
        keys = step.make.randn(cache.shape[0], *query.shape[1:], dtype=query.dtype)
        biases = step.make.randn(cache.shape[0], query.shape[1])
        yield Arguments((query, cache, pages, keys, biases))


def mean_cases(step: Step) -> Iterator[Arguments]:
    yield Arguments((step.paged.k_cache, complete_pages(step)))


def write_cases(step: Step) -> Iterator[Arguments]:
    own, size = step.shape, step.shape.size
    page = step.paged.page_table.long()[step.row, step.slot // size]
    shape = (step.row.numel(), own.kv_heads, own.dim)
    k, v = (step.make.randn(*shape, dtype=own.dtype) for _ in range(2))
    yield Arguments((k, v, *step.caches, page * size + step.slot % size))


def heads_cases(step: Step) -> Iterator[Arguments]:
    own, make = step.shape, step.make
    query_heads = own.kv_heads * own.group
    normed = 2 * query_heads + own.kv_heads
    for *_, location in (given.args for given in write_cases(step)):
        columns = (normed + own.kv_heads) * own.dim
        projected = make.randn(step.row.numel(), columns, dtype=own.dtype)
        weight = make.randn(normed, own.dim, dtype=own.dtype)
        angles = make.randn(step.row.numel(), own.dim)
        yield Arguments((projected, None, weight, angles, *step.caches, location, query_heads))


CASES: dict[Op, Callable[[Step], Iterator[Arguments]]] = {
    ops.window_attention: window_cases,
    ops.dense_attention: dense_cases,
    ops.landmark_attention: landmark_cases,
    ops.select_pages: select_cases,
    ops.page_attention: page_cases,
    ops.prior_summary: prior_cases,
    ops.store_prior_summary: store_cases,
    ops.mean_summary: mean_cases,
    ops.write_kv: write_cases,
    ops.heads_into_cache: heads_cases,
}


def kernels_of(op: Op) -> list[Implementation]:
    return [one for one in op.implementations.values() if one.devices == ("cuda",)]


def test_every_op_over_pages_has_shapes_here():
    """Ops of the engine; families only for users of the library have their own shapes.
    framed_attention runs landmark_attention's kernels, and has no scale that keeps scores exact."""
    own = ("flash_attn", "flash_mla", "memory")
    paged = {
        op for op in all_ops() if "k_cache" in op.__signature__.parameters and op.family not in own
    }
    assert paged <= {*CASES, ops.framed_attention}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("op", CASES, ids=lambda op: op.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shape(op: Op, shape: Shape, kind: str) -> None:
    cases = list(CASES[op](step_of(shape, kind)))
    ran = 0
    for implementation in kernels_of(op):
        for arguments in runnable(implementation, cases, "cuda"):
            check(op, implementation.name, arguments)
            ran += 1
    assert ran >= len(cases), f"no kernel of {op.name} takes {shape}"
