"""Six ways to specify the records that a token reads give bitwise equal results."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cairn.ops import gpu, paged_mla, sparse_mla
from cairn.ops.sparse_mla import records
from cairn.ops.sparse_mla.tuning import TUNING

SIZE, LATENT, ROPE, PAGES, TOKENS, MOST, SCALE = 16, 128, 16, 12, 5, 40, 0.1
LENGTHS = (40, 0, 1, 17, 33)
SOURCES = ("gathered", "indexed", "global slots", "paged")


def attention(q: Tensor, keys: Tensor) -> Tensor:
    """o [H, r] float64 of one token over keys [n, r + dr]."""
    if not len(keys):
        return torch.zeros(q.shape[0], LATENT).double()
    weights = (q.double() @ keys.double().T * SCALE).softmax(-1)
    return weights @ keys[:, :LATENT].double()


class Case:
    """Records in float8 in pages, and what tokens read of them."""

    def __init__(self, heads: int, device: str) -> None:
        g = torch.Generator().manual_seed(3)
        plain = torch.randn(PAGES * SIZE, LATENT + ROPE, generator=g)
        # Pages without an owner.
        plain[-SIZE:] = torch.nan
        small = records.quantize(*plain.split((LATENT, ROPE), dim=-1))
        self.lines = small.to(device)
        self.worth = records.dequantize(small, LATENT)
        self.table = torch.randperm(PAGES - 1, generator=g)[:TOKENS].unsqueeze(1)
        more = torch.randint(0, PAGES - 1, (TOKENS, 2), generator=g)
        self.table = torch.cat((self.table, more), dim=1).int().to(device)
        slot = torch.arange(MOST)
        self.cells = self.table.cpu()[:, slot // SIZE] * SIZE + slot % SIZE
        self.q = torch.randn(TOKENS, heads, LATENT + ROPE, generator=g).to(device)
        self.length = torch.tensor(LENGTHS, dtype=torch.int32, device=device)
        self.ends = self.length
        self.device = device
        self.behind = PAGES * SIZE - 1

    def guard(self, most: int) -> None:
        """Lists of length `most`, padded with -1."""
        self.behind, self.ends = -1, torch.full_like(self.length, most)

    def read(
        self, source: str, most: int = MOST, implementation: str | None = None
    ) -> tuple[Tensor, Tensor]:
        """(o, lse) for lists of this capacity; entries beyond the length point to unowned
        records."""
        given = (self.ends, SCALE, LATENT)
        cells = torch.full((TOKENS, most), self.behind)
        cells[:, :MOST] = self.cells
        counts = torch.arange(most) < self.length.cpu()[:, None]
        cells = cells.where(counts, self.behind)
        if source == "paged":
            row = torch.arange(TOKENS, device=self.device)
            cache = self.lines.view(PAGES, SIZE, -1)
            return paged_mla(self.q, cache, self.table, row, *given)
        if source == "gathered":
            # A token's own records side by side.
            cache = self.lines[cells.clamp(min=0).flatten().to(self.device)].view(TOKENS, most, -1)
            own = torch.arange(TOKENS * most).view(TOKENS, most)
            own = own.where(counts | (self.behind >= 0), -1)
        elif source == "indexed":
            cache, own = self.lines.unsqueeze(0), cells
        else:
            # Pages with a gap between them.
            cache = self.lines.new_full((PAGES, SIZE + 4, self.lines.shape[1]), 255)[:, :SIZE]
            cache.copy_(self.lines.view(PAGES, SIZE, -1))
            own = cells
        attend = sparse_mla if implementation is None else sparse_mla.using(implementation)
        return attend(self.q, cache, own.int().to(self.device), *given)


@pytest.mark.parametrize("heads", [1, 6])
@pytest.mark.parametrize("source", SOURCES)
def test_every_source_gives_the_same(source: str, heads: int, device: str) -> None:
    case = Case(heads, device)
    o, lse = case.read(source)
    for t, count in enumerate(LENGTHS):
        wanted = attention(case.q[t].cpu(), case.worth[case.cells[t, :count]])
        torch.testing.assert_close(o[t].double().cpu(), wanted, rtol=1e-4, atol=1e-4)
    assert not o[1].any() and bool(lse[1].isneginf().all())


@pytest.mark.skipif(not (gpu.AVAILABLE or gpu.INTERPRETED), reason="needs Triton")
@pytest.mark.parametrize("source", ["gathered", "indexed", "global slots"])
def test_a_loop_that_ends_at_the_length_changes_no_bit(source: str, device: str) -> None:
    """Equal to a loop over the whole list in which cells beyond the length are invalid."""
    case = Case(6, device)
    # The same number of splits for any loop length.
    with TUNING.replaced(programs=1, few_programs=1):
        bounded = case.read(source, 4 * MOST, "triton")
        case.guard(4 * MOST)
        guarded = case.read(source, 4 * MOST, "triton")
    assert torch.equal(bounded[0], guarded[0]) and torch.equal(bounded[1], guarded[1])
