"""What is reported of tokens: how likely they were, and which others were likelier."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cairn import ops
from cairn.runner.staging import Arriving, send
from cairn.types import Alternatives, LogprobColumns

BLOCK_BYTES = 128 << 20
"""Lines of the vocabulary are looked through in blocks of at most so many bytes of float32."""
LEAST_CHOSEN, MOST_CHOSEN = 32, 4096
"""At least so many are looked for: kernels are compiled for how many. More than the most are sorted
out of all."""


def block_rows(vocab_size: int) -> int:
    """Lines of a block."""
    return max(1, BLOCK_BYTES // (4 * vocab_size))


class Reported:
    """What is reported of some tokens, put together on the device and on its way to the host.

    Args:
        logits: [n, V] float32.
        tokens: [n] int64, those taken; -1 where there is none, of which any may be reported.
        wanted: [n], how many of the most likely ones are reported beside each; -1: all.
    """

    def __init__(self, logits: Tensor, tokens: Tensor, wanted: Sequence[int]) -> None:
        self._parts: list[tuple[Sequence[int], Arriving]] = []
        rows, vocab_size = logits.shape
        most, taken = block_rows(vocab_size), tokens.clamp(min=0)
        for count in sorted(set(wanted)):
            alike = [i for i, other in enumerate(wanted) if other == count]
            number = vocab_size if count < 0 else min(count, vocab_size)
            for begin in range(0, len(alike), most):
                at = alike[begin : begin + most]
                if len(at) == rows:
                    lines, ids = logits, taken
                else:
                    (index,) = send((np.array(at),), logits.device)
                    lines, ids = logits[index], taken[index]
                self._parts.append((at, _sent(lines, ids, number)))

    def entries(self) -> list[Alternatives]:
        """One for each of the tokens; waits for them."""
        if len(self._parts) == 1:
            [columns] = self.columns()
            return list(columns.positions())
        found: dict[int, Alternatives] = {}
        for (at, _), columns in zip(self._parts, self.columns(), strict=True):
            found |= zip(at, columns.positions(), strict=True)
        return [found[i] for i in sorted(found)]

    def columns(self) -> list[LogprobColumns]:
        """The same side by side, where all want the same; waits for them."""
        return [LogprobColumns(*arriving.arrays()) for _, arriving in self._parts]


def _sent(logits: Tensor, taken: Tensor, count: int) -> Arriving:
    """On their way: ids [n, count + 1] int64 and log-probabilities [n, count + 1] of the most
    likely tokens and of those taken [n], and the ranks of these [n] int64."""
    peak, log_sum, rank = ops.score_tokens(logits, taken)
    ids = torch.cat((largest(logits, count), taken[:, None]), 1)
    return Arriving(ids, logits.gather(1, ids) - peak[:, None] - log_sum[:, None], rank)


def largest(values: Tensor, count: int) -> Tensor:
    """Where the `count` largest of each line of values [n, V] float32 are, the largest first; of
    equals those in front: [n, count] int64."""
    if not count:
        return values.new_empty((len(values), 0), dtype=torch.int64)
    if count > MOST_CHOSEN:
        return torch.sort(values, dim=1, descending=True, stable=True).indices[:, :count]
    lengths = torch.full((len(values),), values.shape[1], dtype=torch.int32, device=values.device)
    chosen = min(max(count, LEAST_CHOSEN), values.shape[1])
    ids = ops.fast_topk_v2(values, lengths, chosen).to(torch.int64)
    order = torch.sort(values.gather(1, ids), dim=1, descending=True, stable=True).indices
    return ids.gather(1, order[:, :count])
