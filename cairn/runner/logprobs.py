"""What is reported of tokens: how likely they were, and which others were likelier."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cairn import ops
from cairn.runner.staging import Arriving, send
from cairn.runner.step import Alternatives

Column = NDArray[Any]

BLOCK_BYTES = 64 << 20
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
        logprobs: [n, V] float32.
        tokens: [n] int64, those taken; -1 where there is none, of which any may be reported.
        wanted: [n], how many of the most likely ones are reported beside each; -1: all.
    """

    def __init__(self, logprobs: Tensor, tokens: Tensor, wanted: Sequence[int]) -> None:
        self._parts: list[tuple[Sequence[int], Arriving]] = []
        rows, vocab_size = logprobs.shape
        most, taken = block_rows(vocab_size), tokens.clamp(min=0)[:, None]
        for count in sorted(set(wanted)):
            alike = [i for i, other in enumerate(wanted) if other == count]
            number = vocab_size if count < 0 else min(count, vocab_size)
            for begin in range(0, len(alike), most):
                at = alike[begin : begin + most]
                if len(at) == rows:
                    lines, ids = logprobs, taken
                else:
                    (index,) = send((np.array(at),), logprobs.device)
                    lines, ids = logprobs[index], taken[index]
                self._parts.append((at, _sent(lines, ids, number)))

    def entries(self) -> list[Alternatives]:
        """One for each of the tokens; waits for them."""
        found: dict[int, Alternatives] = {}
        for at, arriving in self._parts:
            found |= zip(at, _alternatives(*arriving.arrays()), strict=True)
        return [found[i] for i in sorted(found)]


def _sent(logprobs: Tensor, taken: Tensor, count: int) -> Arriving:
    """On their way: ids [n, count + 1] int64 and log-probabilities [n, count + 1] of the most
    likely tokens and of those taken [n, 1], and the ranks of these [n] int64."""
    chosen = logprobs.gather(1, taken)
    rank = (logprobs > chosen).sum(1) + 1
    ids = torch.cat((largest(logprobs, count), taken), 1)
    return Arriving(ids, logprobs.gather(1, ids), rank)


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


def _alternatives(ids: Column, values: Column, rank: Column) -> Iterator[Alternatives]:
    """From what `_sent` sends."""
    count = ids.shape[1] - 1
    ranks = np.empty_like(ids)
    ranks[:, :count] = np.arange(1, count + 1)
    ranks[:, count] = rank
    # The token taken stands behind the others where it is not among them.
    among = (ids[:, :count] == ids[:, count:]).any(axis=1)
    for i, end in enumerate((count + 1 - among).tolist()):
        # Copies: what is kept of one token must not keep what there is of all.
        own = (column[i, :end].copy() for column in (ids, values, ranks))
        yield Alternatives(float(values[i, count]), *own)
