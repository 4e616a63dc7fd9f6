"""Random paged caches for attention and landmark ops, with NaN in unused slots."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass
class Geometry:
    """A step over a paged cache; `pages[r]` are the physical pages of row r in logical order."""

    size: int
    heads: int
    group: int
    dim: int
    dtype: torch.dtype
    lengths: list[int]
    pages: list[list[int]]
    k_cache: Tensor
    v_cache: Tensor
    page_table: Tensor
    row: Tensor
    slot: Tensor
    q: Tensor

    @property
    def where(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.row, self.slot, self.page_table

    def key(self, row: int, slot: int) -> tuple[Tensor, Tensor]:
        """k, v [h_kv, d] of one slot, float64."""
        page = self.pages[row][slot // self.size]
        at = (page, slice(None), slot % self.size)
        return self.k_cache[at].double(), self.v_cache[at].double()


STEPS = ("decode", "prefill", "mixed")


def draw(seed: int, step: str, dtype: torch.dtype = torch.float32) -> Geometry:
    """A random geometry, with huge values in landmark slots."""
    g = torch.Generator().manual_seed(seed)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=g))

    size = (4, 5, 8, 16, 32, 64)[pick(0, 5)]
    heads, group, dim = pick(1, 4), (1, 2, 3, 4, 8)[pick(0, 4)], (16, 24, 32, 64)[pick(0, 3)]
    rows = pick(1, 5)
    lengths = [pick(1, 200) if pick(0, 2) else pick(1, 700) for _ in range(rows)]
    counts = []
    for length in lengths:
        few, many = min(length, pick(1, 2)), pick(1, min(length, 150))
        counts.append({"decode": few, "prefill": many, "mixed": (few, many)[pick(0, 1)]}[step])
    owned = [-(-length // size) for length in lengths]
    total = sum(owned) + 3
    order = torch.randperm(total, generator=g).tolist()
    pages = [[order.pop() for _ in range(n)] for n in owned]
    table = torch.randint(0, total, (rows, max(owned) + pick(0, 2)), generator=g).to(torch.int32)
    caches = torch.full((2, total, heads, size, dim), torch.nan, dtype=dtype)
    for row, mine in enumerate(pages):
        table[row, : len(mine)] = torch.tensor(mine)
        for logical, page in enumerate(mine):
            filled = min(size, lengths[row] - logical * size)
            values = torch.randn(2, heads, filled, dim, generator=g)
            caches[:, page, :, :filled] = values.to(dtype)
    pairs = [
        (row, slot)
        for row, (length, count) in enumerate(zip(lengths, counts, strict=True))
        for slot in range(length - count, length)
    ]
    found = torch.tensor(pairs)
    q = torch.randn(len(pairs), heads * group, dim, generator=g).to(dtype)
    row, slot = found[:, 0].contiguous(), found[:, 1].contiguous()
    shape = (size, heads, group, dim, dtype, lengths, pages)
    return Geometry(*shape, caches[0], caches[1], table, row, slot, q)


def enlarge_landmarks(case: Geometry, value: float = 1e30) -> None:
    """Huge keys and values in the last slot of every page."""
    case.k_cache[:, :, -1] = value
    case.v_cache[:, :, -1] = -value


def softmax_attention(
    q: Tensor, keys: Sequence[Tensor] | Tensor, values: Sequence[Tensor] | Tensor, scale: float
):
    """Attention of one query [d] to lists of [d] in numpy float64: (o [d], lse); independent of the
    library."""
    if len(keys) == 0:
        return torch.zeros(q.shape[0]).double(), torch.tensor(-torch.inf, dtype=torch.float64)
    logits = scale * (_lines(keys) @ q.double().numpy())
    top = logits.max()
    terms = np.exp(logits - top)
    total = math.fsum(terms)
    o = terms @ _lines(values) / total
    return torch.from_numpy(o), torch.tensor(top + math.log(total), dtype=torch.float64)


def _lines(rows: Sequence[Tensor] | Tensor) -> np.ndarray:
    """[n, d] float64."""
    return (rows if isinstance(rows, Tensor) else torch.stack(list(rows))).double().numpy()


def sample(case: Geometry, count: int, seed: int = 0) -> list[int]:
    """Some tokens of the step, first and last among them (the oracle is slow)."""
    tokens = case.row.numel()
    if tokens <= count:
        return list(range(tokens))
    g = torch.Generator().manual_seed(seed)
    inner = torch.randperm(tokens, generator=g)[: count - 2].tolist()
    return sorted({0, tokens - 1, *inner})


def near(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Compare with a float64 oracle: 1e-5 for float32, a few roundings for bfloat16."""
    rtol, atol = (1e-5, 2e-6) if dtype == torch.float32 else (1.6e-2, 1e-2)
    torch.testing.assert_close(actual.double(), expected.double(), rtol=rtol, atol=atol)
