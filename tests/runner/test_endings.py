"""The last part of a decode graph, which depends on what its rows request."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cairn.runner.graphs import Ending
from cairn.runner.logprobs import MAX_GRAPH_LOGPROBS
from cairn.runner.runner import Runner
from cairn.runner.sampler import Picks, Sampler
from cairn.runner.step import RowOpen
from cairn.types import SamplingParams

ROWS = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 0.5},
    "own": {"temperature": 0, "logprobs": 0},
    "most": {"temperature": 0, "logprobs": MAX_GRAPH_LOGPROBS},
    "more": {"temperature": 0, "logprobs": MAX_GRAPH_LOGPROBS + 1},
    "all": {"temperature": 0, "logprobs": -1},
    "late": {"temperature": 0, "logprobs": 2, "min_tokens": 3},
    "penalised": {"temperature": 0, "logprobs": 2, "repetition_penalty": 1.2},
}


@pytest.mark.parametrize(
    ("rows", "number", "ending", "drawing"),
    [
        (["greedy"], 0, Ending.GREEDY, False),
        (["drawn", "greedy"], 0, Ending.DRAW, True),
        (["greedy", "own"], 0, Ending.REPORT, True),
        (["drawn", "most"], 0, Ending.REPORT, True),
        (["more", "own"], 0, Ending.LOGITS, False),
        (["drawn", "all"], 0, Ending.LOGITS, True),
        (["late", "own"], 2, Ending.LOGITS, False),
        (["late", "own"], 3, Ending.REPORT, True),
        (["own", "penalised"], 0, Ending.LOGITS, False),
    ],
)
def test_endings_by_sampling_parameters(
    rows: list[str], number: int, ending: Ending, drawing: bool
) -> None:
    runner = Runner.__new__(Runner)
    runner.sampler = Sampler(100, len(ROWS), torch.device("cpu"))
    for row, params in enumerate(ROWS.values()):
        runner.sampler.open(RowOpen(row, "", SamplingParams(**params), seed=0))
    places = np.array([list(ROWS).index(name) for name in rows])
    picks = Picks(places, np.full(len(rows), number))
    sampling = runner._sampling(picks, runner.sampler.reports(picks)[1])
    assert (sampling.ending, sampling.draws is not None) == (ending, drawing)
