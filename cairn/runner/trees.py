"""Steps in which rows run several branches of guesses.

Each branch has its own row in the page tables: the pages of its main row, with the last page
replaced by a copy. So attention kernels run as in any step, and branches do not see each other.
After the step the page of the branch with the most right guesses is copied back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cairn.cache.pools import CachePools
from cairn.runner.rows import Rows
from cairn.runner.staging import send
from cairn.runner.step import Ints, RowWork, StepPlan


class Tree(NamedTuple):
    """The branches of a step.

    Attributes:
        plan: the step, with one more work for each branch, after the others.
        chains: [R, width], for each row the indices, among works that sample, of its own work and
            of its branches; padded with its own index.
        pages: by page group, [R, width], the last page of each of these works.
    """

    plan: StepPlan
    chains: Ints
    pages: tuple[Ints, ...]

    @classmethod
    def of(cls, plan: StepPlan, rows: Rows) -> Tree | None:
        """The branches of a plan, None where no row has any; writes the plan's grants to the host's
        page tables."""
        works = [work for work in plan.work if work.sample]
        if not any(work.branches for work in works):
            return None
        rows.grant(plan)
        count = len(plan.decode.row) + len(works)
        width = 1 + max(len(work.branches) for work in works)
        chains = np.arange(count)[:, None].repeat(width, 1)
        pages = tuple(np.zeros((count, width), dtype=np.int64) for _ in rows.page_tables)
        extra: list[RowWork] = []
        for number, work in enumerate(works, len(plan.decode.row)):
            for i, guesses in enumerate(work.branches, 1):
                chains[number, i] = count + len(extra)
                extra.append(branch_of(work, i, guesses, rows.num_requests))
            for group, found in enumerate(pages):
                own = [rows.last_page(work, i, group) for i in range(1 + len(work.branches))]
                found[number] = [*own, *[own[0]] * (width - len(own))]
        return cls(plan._replace(work=(*plan.work, *extra)), chains, pages)

    def begin(self, pools: CachePools) -> None:
        """Copy the last pages of rows to those of their branches."""
        for group, pages in enumerate(self.pages):
            number, i = np.nonzero(pages != pages[:, :1])
            if len(number):
                device = next(pools.tensors(group)).device
                source, target = send((pages[number, 0], pages[number, i]), device)
                pools.copy_pages(group, source, target)

    def end(self, last: Tensor, counts: Tensor, pools: CachePools) -> tuple[Tensor, Tensor]:
        """Keep, for each row, the work with the most accepted tokens, and copy its page back.

        Args:
            last, counts: of all works that sample, see `Drafts.accept`.
        Returns:
            `last` and `counts` of the kept works [R].
        """
        chains, *pages = send((self.chains, *self.pages), last.device)
        order = torch.arange(chains.shape[1], device=last.device)
        # The first one in case of ties.
        best = (counts[chains] * chains.shape[1] - order).argmax(dim=1, keepdim=True)
        for group, found in enumerate(pages):
            pools.copy_pages(group, found.gather(1, best)[:, 0], found[:, 0])
        chosen = chains.gather(1, best)[:, 0]
        return last[chosen], counts[chosen]

    def best(self, counts: Sequence[int]) -> list[int]:
        """The same choice on the host: the indices of the kept works [R]."""
        held = np.array(counts)[self.chains]
        chosen = self.chains[np.arange(len(held)), held.argmax(axis=1)]
        return list(chosen.tolist())


def branch_of(work: RowWork, number: int, guesses: Sequence[int], num_requests: int) -> RowWork:
    """A branch of a row as a work of its own."""
    assert work.tokens is not None
    return work._replace(
        row=number * num_requests + work.row,
        tokens=[work.tokens[0], *guesses],
        drafts=len(guesses),
        branches=(),
    )
