"""One kernel, whatever says which records a token reads: six ways to say the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cairn.ops import paged_mla, sparse_mla
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
        # What nobody owns.
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
        self.device = device

    def read(self, source: str, most: int = MOST) -> tuple[Tensor, Tensor]:
        """(o, lse), of lists with room for so many; behind its length a list names nobody's."""
        given = (self.length, SCALE, LATENT)
        cells = torch.full((TOKENS, most), PAGES * SIZE - 1)
        cells[:, :MOST] = self.cells
        cells = cells.where(torch.arange(most) < self.length.cpu()[:, None], PAGES * SIZE - 1)
        if source == "paged":
            row = torch.arange(TOKENS, device=self.device)
            cache = self.lines.view(PAGES, SIZE, -1)
            return paged_mla(self.q, cache, self.table, row, *given)
        if source == "gathered":
            # A token's own records side by side.
            cache = self.lines[cells.flatten().to(self.device)].view(TOKENS, most, -1)
            own = torch.arange(TOKENS * most).view(TOKENS, most)
        elif source == "indexed":
            cache, own = self.lines.unsqueeze(0), cells
        else:
            # Pages with a gap behind each.
            cache = self.lines.new_full((PAGES, SIZE + 4, self.lines.shape[1]), 255)[:, :SIZE]
            cache.copy_(self.lines.view(PAGES, SIZE, -1))
            own = cells
        return sparse_mla(self.q, cache, own.int().to(self.device), *given)


@pytest.mark.parametrize("heads", [1, 6])
@pytest.mark.parametrize("source", SOURCES)
def test_every_source_gives_the_same(source: str, heads: int, device: str) -> None:
    case = Case(heads, device)
    o, lse = case.read(source)
    for t, count in enumerate(LENGTHS):
        wanted = attention(case.q[t].cpu(), case.worth[case.cells[t, :count]])
        torch.testing.assert_close(o[t].double().cpu(), wanted, rtol=1e-4, atol=1e-4)
    assert not o[1].any() and bool(lse[1].isneginf().all())


@pytest.mark.gpu
@pytest.mark.parametrize("source", ["gathered", "indexed", "global slots"])
def test_a_loop_that_ends_at_the_length_changes_no_bit(source: str) -> None:
    """As a loop over all there is room for, which passes over what lies behind the length."""
    case = Case(6, "cuda")
    # As many splits, however much room there is.
    with TUNING.replaced(programs=1, few_programs=1):
        short, long = case.read(source), case.read(source, 2048)
    assert torch.equal(short[0], long[0]) and torch.equal(short[1], long[1])
