"""draw_tokens against a scalar loop and against its distribution; batch invariance."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cairn.ops import argmax_tokens, counter_uniform, draw_tokens
from cairn.ops.sampling.top_p_renorm_probs import top_p_renorm
from cairn.ops.sampling.tuning import TUNING
from tests.ops.sampling.variants import interpreted, runnable_on

INF, NAN = math.inf, math.nan
GREEDY = (0.0, 0, 1.0, 0.0)
PLAIN = (1.0, 0, 1.0, 0.0)
SETTINGS = [
    PLAIN,
    (0.7, 7, 1.0, 0.0),
    (1.3, 0, 0.8, 0.0),
    (1.0, 0, 1.0, 0.15),
    (0.8, 9, 0.9, 0.05),
    (2.0, 40, 0.95, 0.3),
    (1e30, 3, 1.0, 0.0),
    (1e30, 0, 0.5, 0.0),
    GREEDY,
]
"""temperature, top_k, top_p, min_p"""


def parameters(
    settings: list[tuple[float, int, float, float]], index: Tensor, device: str
) -> list[Tensor]:
    """The arguments after `logits`; the seed of every row is 11."""
    temperature, top_k, top_p, min_p = zip(*settings, strict=True)
    columns = [
        torch.tensor(temperature),
        torch.tensor(top_k),
        torch.tensor(top_p),
        torch.tensor(min_p),
        torch.full((len(settings),), 11),
        index,
    ]
    return [column.to(device) for column in columns]


def law(row: list[float], setting: tuple[float, int, float, float]) -> list[float]:
    """Distribution of a token in float64, for finite logits."""
    temperature, top_k, top_p, min_p = setting
    best = max(row)
    if temperature == 0:
        return [float(i == row.index(best)) for i in range(len(row))]
    weights = [math.exp((x - best) / temperature) for x in row]
    order = sorted(range(len(row)), key=lambda t: (-weights[t], t))
    if 1 <= top_k < len(row):
        order = [t for t in order if weights[t] >= weights[order[top_k - 1]]]
    total, before, kept = sum(weights[t] for t in order), 0.0, []
    for t in order:
        if kept and top_p < 1 and before >= top_p * total:
            break
        kept.append(t)
        before += weights[t]
    kept = [t for t in kept if weights[t] >= min_p]
    mass = sum(weights[t] for t in kept)
    return [weights[t] / mass if t in set(kept) else 0.0 for t in range(len(row))]


def drawn_by(probabilities: list[float], uniform: float) -> int:
    running = 0.0
    for token, p in enumerate(probabilities):
        running += p
        if p > 0 and running > uniform:
            return token
    raise AssertionError("no token")


@pytest.mark.parametrize("width", [13, 1100])
def test_against_scalars(width: int, device: str) -> None:
    torch.manual_seed(width)
    logits = torch.randn(len(SETTINGS), width) * 2
    args = parameters(SETTINGS, torch.full((len(SETTINGS),), 100), device)
    uniform = counter_uniform(args[4], args[5]).tolist()
    expected = [
        drawn_by(law(row, setting), u)
        for row, setting, u in zip(logits.tolist(), SETTINGS, uniform, strict=True)
    ]
    for name in runnable_on(draw_tokens, device):
        assert draw_tokens.using(name)(logits.to(device), *args).tolist() == expected, name


def assert_drawn_from(counts: Tensor, expected: Tensor) -> None:
    """Chi-square, with rare tokens taken together."""
    draws = counts.sum()
    assert counts[expected == 0].sum() == 0
    rare = (expected > 0) & (expected * draws < 20)
    common = expected * draws >= 20
    seen = torch.cat([counts[common], counts[rare].sum()[None]])
    wanted = torch.cat([expected[common], expected[rare].sum()[None]]) * draws
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    freedom = max(1, seen.numel() - 1)
    statistic = float(((seen - wanted) ** 2 / wanted).sum())
    assert (statistic - freedom) / math.sqrt(2 * freedom) < 4.5


@pytest.mark.parametrize("setting", SETTINGS[:6], ids=str)
def test_law_of_many_draws(setting: tuple[float, int, float, float], device: str) -> None:
    many, width, part = 100_000, 60, 20_000
    torch.manual_seed(3)
    row = torch.randn(width) * 2
    row[5] = row[9]
    counts = torch.zeros(width, dtype=torch.float64)
    for begin in range(0, many, part):
        args = parameters([setting] * part, torch.arange(begin, begin + part), device)
        tokens = draw_tokens(row.to(device).expand(part, -1).contiguous(), *args)
        counts += torch.bincount(tokens.cpu(), minlength=width)
    assert_drawn_from(counts, torch.tensor(law(row.tolist(), setting), dtype=torch.float64))


@pytest.mark.gpu
@pytest.mark.parametrize("width", [32_000, 100_278, 262_144])
@pytest.mark.parametrize("sharpness", [1.0, 4.0])
def test_large_vocabulary(width: int, sharpness: float) -> None:
    torch.manual_seed(width)
    filters = [(1.0, k, p, m) for k in (0, 50, 3000) for p in (0.9, 0.999, 1.0) for m in (0.0, 0.1)]
    logits = torch.randn(len(filters), width, device="cuda") * sharpness
    args = parameters(filters, torch.arange(len(filters)), "cuda")
    expected = draw_tokens.using("reference")(logits, *args)
    assert torch.equal(draw_tokens(logits, *args), expected)


@pytest.mark.parametrize("top_p", [0.3, 0.999])
def test_a_least_share_above_the_nucleus(top_p: float, device: str) -> None:
    torch.manual_seed(6)
    many = 6
    logits = torch.randn(many, 1300).to(device)
    args = parameters([(1.0, 0, top_p, 0.3)] * many, torch.arange(many), device)
    expected = draw_tokens.using("reference")(logits, *args).tolist()
    for name in runnable_on(draw_tokens, device):
        assert draw_tokens.using(name)(logits, *args).tolist() == expected, name


def test_a_share_of_rows_that_their_sample_is_unlike(device: str) -> None:
    torch.manual_seed(10)
    width, seen = 1300, torch.tensor([-9.0, 4.0, -9.0, 4.0])
    logits = torch.randn(4, width) * 0.5
    for begin in range(0, width, TUNING.min_chunk):
        logits[:, begin : begin + TUNING.sample] += seen[:, None]
    logits[:, 700] = 5.0
    args = parameters([(1.0, 0, p, 0.0) for p in (0.9, 0.6, 0.6, 0.0)], torch.arange(4), device)
    for name in runnable_on(draw_tokens, device):
        rows = slice(0, 2 if interpreted(name, device) else 4)
        given = (logits[rows].to(device), *(a[rows] for a in args))
        expected = draw_tokens.using("reference")(*given).tolist()
        assert draw_tokens.using(name)(*given).tolist() == expected, name


@pytest.mark.gpu
def test_law_of_a_large_vocabulary() -> None:
    many, width, part = 100_000, 32_000, 2_000
    torch.manual_seed(4)
    row = torch.randn(width) * 3
    setting = (1.0, 200, 0.95, 0.0)
    counts = torch.zeros(width, dtype=torch.float64)
    wide = row.cuda().expand(part, -1).contiguous()
    for begin in range(0, many, part):
        args = parameters([setting] * part, torch.arange(begin, begin + part), "cuda")
        counts += torch.bincount(draw_tokens(wide, *args).cpu(), minlength=width)
    assert_drawn_from(counts, torch.tensor(law(row.tolist(), setting), dtype=torch.float64))


def test_a_row_alone_draws_as_in_its_batch(device: str) -> None:
    torch.manual_seed(5)
    mixed = [SETTINGS[i] for i in (4, 0, 8, 2)]
    logits = (torch.randn(4, 1300) * 3).to(device)
    args = parameters(mixed, torch.arange(4), device)
    for name in runnable_on(draw_tokens, device):
        draw = draw_tokens.using(name)
        together = draw(logits, *args).tolist()
        order = torch.tensor([3, 1, 0, 2], device=device)
        shuffled = draw(logits[order], *(a[order] for a in args)).tolist()
        assert shuffled == [together[i] for i in order.tolist()], name
        for row in (0, 1):
            at = slice(row, row + 1)
            assert draw(logits[at], *(a[at] for a in args)).tolist() == together[at], name


def test_equal_logits_at_the_edges(device: str) -> None:
    # Four of seven are equal and largest; the others have weight exp(-100), which is lost in
    # float32 sums.
    row = torch.tensor([0.0, 100.0, 0.0, 100.0, 100.0, 100.0, 0.0])
    cases: list[tuple[tuple[float, int, float, float], set[int]]] = [
        ((1.0, 1, 1.0, 0.0), {1, 3, 4, 5}),
        ((1.0, 0, 0.25, 0.0), {1}),
        ((1.0, 0, 0.5, 0.0), {1, 3}),
        ((1.0, 0, 0.51, 0.0), {1, 3, 4}),
        ((1.0, 2, 0.75, 1.0), {1, 3, 4}),
        ((1.0, 0, 0.0, 0.0), {1}),
        ((1.0, 0, 1.0, 1.0), {1, 3, 4, 5}),
        # A temperature so high that all weights round to 1: top 2 keeps all seven.
        ((1e30, 2, 1.0, 0.0), set(range(7))),
        ((1e30, 0, 0.3, 0.0), {0, 1, 2}),
    ]
    draws = 60
    settings = [setting for setting, _ in cases for _ in range(draws)]
    index = torch.arange(draws).repeat(len(cases))
    logits = row.expand(len(settings), -1).contiguous().to(device)
    for name in runnable_on(draw_tokens, device):
        step = draws // 2 if interpreted(name, device) else 1
        args = [a[::step] for a in parameters(settings, index, device)]
        tokens = draw_tokens.using(name)(logits[::step], *(a.contiguous() for a in args))
        for (setting, allowed), found in zip(cases, tokens.view(len(cases), -1), strict=True):
            drawn = set(found.tolist())
            assert drawn <= allowed, (name, setting)
            assert step > 1 or drawn == allowed, (name, setting)


def test_rows_are_listed_a_few_at_a_time(device: str) -> None:
    torch.manual_seed(9)
    logits = (torch.randn(3, 600) * 3).to(device)
    args = parameters([SETTINGS[i] for i in (4, 8, 2)], torch.arange(3), device)
    probs = torch.softmax(logits, dim=-1)
    for op, own in ((draw_tokens, (logits, *args)), (top_p_renorm, (probs, args[2]))):
        for name in runnable_on(op, device)[1:]:
            expected = op.using(name)(*own)
            with TUNING.replaced(workspace_bytes=2 * 4 * 1024):
                assert torch.equal(op.using(name)(*own), expected), name


@pytest.mark.parametrize("share", [0.6, 0.95])
def test_each_filter_sees_what_the_one_before_left(share: float, device: str) -> None:
    # The top 6 sum to 1.9, so top_p = 0.6 (1.14) keeps two tokens; after min-p (sum 1.5) it would
    # keep one. With top_p = 0.95, min-p drops four tokens.
    row = torch.tensor([1.0, 0.5, 0.1, 0.1, 0.1, 0.1, 0.01]).log()
    draws = 12
    args = parameters([(1.0, 6, share, 0.3)] * draws, torch.arange(draws), device)
    logits = row.expand(draws, -1).contiguous().to(device)
    for name in runnable_on(draw_tokens, device):
        assert set(draw_tokens.using(name)(logits, *args).tolist()) == {0, 1}, name


def test_kept_tokens_do_not_depend_on_positions(device: str) -> None:
    # The second largest weight is far below the largest and close to others.
    weights = torch.full((1100,), 1e-6)
    weights[3], weights[600:640], weights[700] = 1.0, 0.2, 0.4
    draws = 12
    args = parameters([(1.0, 2, 1.0, 0.0)] * draws, torch.arange(draws), device)
    logits = weights.log().expand(draws, -1).contiguous().to(device)
    for name in runnable_on(draw_tokens, device):
        assert set(draw_tokens.using(name)(logits, *args).tolist()) == {3, 700}, name


def test_odd_rows(device: str) -> None:
    odd = torch.tensor(
        [[NAN, 1.0, 2.0], [-INF, -INF, -INF], [INF, 0.0, INF], [-INF, 0.0, -INF], [0.0, 3e38, 0.0]]
    )
    for setting, expected in (
        (PLAIN, [-1, -1, -1, 1, 1]),
        ((0.5, 2, 0.9, 0.1), [-1, -1, -1, 1, 1]),
        (GREEDY, [-1, -1, 0, 1, 1]),
    ):
        args = parameters([setting] * 5, torch.arange(5), device)
        for name in runnable_on(draw_tokens, device):
            assert draw_tokens.using(name)(odd.to(device), *args).tolist() == expected, name


def test_extreme_temperatures(device: str) -> None:
    limits = torch.finfo(torch.float32)
    torch.manual_seed(6)
    logits = (torch.randn(4, 50) * 10).to(device)
    for temperature, tokens in (
        (limits.tiny, argmax_tokens(logits).tolist()),
        (limits.max, None),
    ):
        args = parameters([(temperature, 0, 0.9, 0.0)] * 4, torch.arange(4), device)
        uniform = counter_uniform(args[4], args[5]).tolist()
        # All 50 are equal; the first 45 hold 0.9.
        expected = tokens or [int(u * 45) for u in uniform]
        for name in runnable_on(draw_tokens, device):
            assert draw_tokens.using(name)(logits, *args).tolist() == expected, name


@pytest.mark.gpu
def test_replay_of_a_graph_reads_parameters_anew() -> None:
    torch.manual_seed(7)
    logits = torch.randn(3, 5000, device="cuda") * 3
    args: list[Any] = parameters([GREEDY] * 3, torch.arange(3), "cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        draw_tokens(logits, *args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = draw_tokens(logits, *args)
    for settings in ([GREEDY] * 3, [PLAIN] * 3, [(0.7, 50, 0.9, 0.0), GREEDY, (1.0, 0, 0.9, 0.1)]):
        for kept, given in zip(args, parameters(settings, torch.arange(3), "cuda"), strict=True):
            kept.copy_(given)
        logits.normal_()
        graph.replay()
        assert torch.equal(tokens, draw_tokens.using("reference")(logits, *args))
