"""Penalties of rows that begin and end, compared with the definition for each row alone."""

from __future__ import annotations

import random

import pytest
import torch

from cairn import ops
from cairn.runner.penalties import LEAST, Penalties
from cairn.runner.step import RowOpen
from cairn.types import SamplingParams

VOCAB = 40
GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)


def by_definition(logits: torch.Tensor, prompt, output, params: SamplingParams) -> torch.Tensor:
    found = logits.cpu()[None].clone()
    mask = torch.zeros(1, VOCAB, dtype=torch.bool)
    mask[0, list(prompt)] = True
    counts = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=VOCAB)[None].int()
    numbers = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
    ops.apply_penalties.reference(found, mask, counts, *(torch.tensor([n]) for n in numbers))
    return found[0]


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_rows_come_and_go(device):
    """More rows than initially allocated; some rows have no penalties."""
    rng, place = random.Random(5), torch.device(device)
    penalties = Penalties(VOCAB, place)
    live: dict[int, tuple[list[int], list[int], SamplingParams]] = {}
    plain: set[int] = set()
    for step in range(120):
        for row in rng.sample(range(30), 3):
            live.pop(row, None)
            plain.discard(row)
            penalties.close(row)
            if rng.random() < 0.2:
                plain.add(row)
            elif rng.random() < 0.8:
                prompt, output = ([rng.randrange(VOCAB) for _ in range(n)] for n in (6, step % 3))
                params = SamplingParams(
                    presence_penalty=rng.choice([0, 0.5, -1]),
                    frequency_penalty=rng.choice([0, 0.25]),
                    repetition_penalty=rng.choice([1.0, 1.5, 0.7]),
                )
                penalties.open(RowOpen(row, "r", params, 0, prompt + output, len(prompt)))
                live[row] = prompt, output, params
        rows = rng.sample([*live, *plain], rng.randint(0, len(live) + len(plain)))
        at = penalties.among(rows)
        assert at == [i for i, row in enumerate(rows) if row in live]
        if not at:
            continue
        logits = torch.randn(len(rows), VOCAB, device=place)
        before = logits.clone()
        penalties.apply(logits, rows, at)
        tokens = torch.tensor([rng.randrange(-1, VOCAB) for _ in rows], device=place)
        penalties.count(tokens, rows, at)
        for i, row in enumerate(rows):
            expected = before[i].cpu()
            if row in live:
                prompt, output, params = live[row]
                expected = by_definition(before[i], prompt, output, params)
                output.append(max(int(tokens[i]), 0))
            torch.testing.assert_close(logits[i].cpu(), expected)
    assert len(live) > LEAST


def test_a_row_that_was_never_opened_may_be_closed():
    penalties = Penalties(VOCAB, torch.device("cpu"))
    penalties.close(3)
    assert penalties.among([3]) == []
