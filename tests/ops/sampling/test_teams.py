"""Filters of rows that several programs hold: on a GPU, and by the interpreter in threads."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from cairn.ops import arrivals, gpu
from cairn.ops.registry import Op
from cairn.ops.sampling import teams
from cairn.ops.sampling.min_p_renorm_probs import min_p_renorm_probs
from cairn.ops.sampling.top_k_mask_logits import top_k_mask
from cairn.ops.sampling.top_k_renorm_probs import top_k_renorm
from cairn.ops.sampling.top_p_renorm_probs import top_p_renorm
from tests.ops.launches import on_hopper

INF, NAN = math.inf, math.nan
VOCABULARY = 1501
LAUNCHES: dict[Op[..., Any], Callable[..., Tensor]] = {
    top_k_mask: teams.mask_logits,
    top_k_renorm: teams.keep_largest,
    min_p_renorm_probs: teams.keep_least,
    top_p_renorm: teams.keep_share,
}


class InTurns:
    """A kernel whose programs take turns, drawn by lot: one goes on until it looks at a counter.
    They wait for each other, and take tickets."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            interpreter: Any = import_module("triton.runtime.interpreter")
            turns = Turns(grid[0])
            # For all of them: else the first that ends takes the language from the others.
            language = interpreter._patch_lang(self.kernel.fn)
            with pytest.MonkeyPatch.context() as patch:
                count = turns.before(interpreter.interpreter_builder.create_atomic_rmw)
                patch.setattr(interpreter.interpreter_builder, "create_atomic_rmw", count)
                try:
                    turns.run(lambda: self.kernel[1,](*args, **options))
                finally:
                    language.restore()

        return launch


class Turns:
    """Threads of which one runs, until it gives its turn away or ends."""

    def __init__(self, count: int) -> None:
        self.turn = [threading.Semaphore(0) for _ in range(count)]
        self.left = list(range(count))
        self.lots = random.Random(count)
        self.error: BaseException | None = None
        self.own = threading.local()

    def run(self, task: Callable[[], None]) -> None:
        """As many times as there are threads."""
        with ThreadPoolExecutor(len(self.turn)) as threads:
            ends = [threads.submit(self.take_part, number, task) for number in self.left]
            self.give()
        for end in ends:
            end.result()

    def take_part(self, number: int, task: Callable[[], None]) -> None:
        self.own.number = number
        self.turn[number].acquire()
        try:
            task()
        except BaseException as error:
            self.error = self.error or error
            raise
        finally:
            self.left.remove(number)
            self.give()

    def give(self) -> None:
        if self.left:
            self.turn[self.lots.choice(self.left)].release()

    def before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A call in front of which another may take the turn."""

        def wait_and_call(*args: Any) -> Any:
            self.give()
            self.turn[self.own.number].acquire()
            if self.error is not None:
                raise RuntimeError("another program has failed") from self.error
            return call(*args)

        return wait_and_call


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Parts of 512 numbers, on memory that holds something. Counters are left as they were."""
    counted = []

    def split(values: Tensor, kind: teams.Kind) -> teams.Team:
        align = 4 if (values.stride(0) - values.shape[1]) % 4 == 0 else 1
        parts = -(-(values.shape[1] + align - 1) // 512)
        return teams.Team(kind, 512, parts, align, 16 // values.element_size(), seated=False)

    def counters(groups: int, device: torch.device) -> Tensor:
        counted.append(torch.zeros(groups, arrivals.APART, dtype=torch.int32, device=device))
        return counted[-1]

    def memory(values: Tensor, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.full((len(values), *shape), -7, dtype=dtype, device=values.device)

    monkeypatch.setattr(teams, "_team", split)
    monkeypatch.setattr(teams, "WARPS", 1)
    monkeypatch.setattr(teams, "_memory", memory)
    monkeypatch.setattr(arrivals, "counters", counters)
    for name in ("top_k_kernel", "min_p_kernel", "top_p_kernel"):
        monkeypatch.setattr(teams, name, InTurns(getattr(teams, name)))
    yield
    assert counted
    assert not any(tensor.any() for tensor in counted)


def assert_as_defined(op: Op[..., Any], got: Tensor, values: Tensor, parameter: Tensor) -> None:
    expected = op.reference(values, parameter)
    if op is top_k_mask:
        torch.testing.assert_close(got, expected, rtol=0.0, atol=0.0, equal_nan=True)
    else:
        assert torch.equal(got > 0, expected > 0)
        torch.testing.assert_close(got, expected, rtol=2e-6, atol=0.0)


def assert_drawn(tokens: Tensor, probs: Tensor, top_p: Tensor, uniform: Tensor) -> None:
    """The first kept token whose running sum goes beyond its part of all that is kept."""
    kept = torch.where(top_p_renorm.reference(probs, top_p) > 0, probs, 0).double()
    running = kept.cumsum(-1)
    total, at = running[:, -1], tokens.long().clamp(min=0)[:, None]
    beyond, own = (x.gather(-1, at)[:, 0] for x in (running, kept))
    wanted, off = uniform.double() * total, total * 1e-12
    right = (own > 0) & (beyond > wanted - off) & (beyond - own <= wanted + off)
    assert torch.where(total > 0, right & (tokens >= 0), tokens == -1).all()


def logits() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(4, VOCABULARY)


def spoilt() -> Tensor:
    """NaN, infinities, and few that are not -inf."""
    rows = logits()
    rows[0, ::7] = NAN
    rows[0, 3::50] = INF
    rows[1:3] = -INF
    rows[1, [3, 900, 1400]] = torch.tensor([1.0, 2.0, INF])
    rows[2, [7, 800]] = torch.tensor([NAN, 3.0])
    rows[3, :1400] = NAN
    rows[3, 1400:1450] = INF
    return rows


def sparse() -> Tensor:
    """Few that are not 0, none, all equal, and nearly nothing."""
    rows = logits().softmax(-1)
    rows[0, 20:] = 0
    rows[1] = 0
    rows[2] = 1 / VOCABULARY
    rows[3] *= 1e-38
    rows[3, 5] = 1e-36
    return rows


def crowded() -> Tensor:
    """One float and the next one, more of each than lists hold; and some larger ones."""
    low = torch.full((4, VOCABULARY), 2.0**-11)
    rows = torch.where(torch.arange(VOCABULARY) % 5 < 2, low, low.nextafter(low + 1))
    rows[2:, 1000:1020] = 2.0**-7
    return rows


def sixteenths() -> Tensor:
    """Multiples of 2^-14, whose sums are exact, and many of which are equal."""
    torch.manual_seed(3)
    return torch.randint(0, 17, (4, VOCABULARY)) / 2.0**14


def shares() -> Iterator[Any]:
    """Shares that a step or two find, and such as many equal numbers lie at."""
    near = torch.tensor([0.9, 0.5, 0.97, 0.8])
    ends = torch.tensor([0.0, 1e-9, 0.999999, 1.0])
    probs, tied = logits().softmax(-1), ((logits() * 4).round() / 4).softmax(-1)
    level = torch.full((4, VOCABULARY), 1 / VOCABULARY)
    for name, values, p in (
        ("probabilities", probs, near),
        ("probabilities to the ends", probs, ends),
        ("sharp ones", (logits() * 6).softmax(-1), near),
        ("flat ones", (logits() * 0.1).softmax(-1), near),
        ("equal ones", tied, near),
        ("equal ones to the ends", tied, ends),
        ("level ones", level, torch.tensor([0.2, 0.5, 0.9, 0.9999])),
        ("level ones to the ends", level, ends),
        ("neighbouring floats", crowded(), torch.tensor([0.1, 0.5, 0.15, 0.7])),
        ("exact sums", sixteenths(), torch.tensor([1, 512, 1024, 8192]) / 2.0**14),
        ("zeros", sparse(), near),
        ("too little", probs * 0.5, torch.tensor([0.6, 0.5, 0.25, 3.0])),
        ("all in one part", probs.sort().values, near),
        ("strided ones", torch.randn(4, 2000).softmax(-1)[:, 3 : 3 + VOCABULARY], near - 0.3),
    ):
        yield pytest.param(top_p_renorm, values, p, id=f"share of {name}")


def few_and_many() -> Iterator[Any]:
    """k that a part lists by itself, that all parts bound together, and that no list holds."""
    tied = (logits() * 4).round() / 4
    few, many = torch.tensor([50, 1, 7, 24]), torch.tensor([400, VOCABULARY - 1, 0, 700])
    for name, k in (("few", few), ("some", torch.tensor([65, 100, 129, 200])), ("many", many)):
        yield pytest.param(top_k_mask, logits(), k, id=f"{name} logits")
        yield pytest.param(top_k_mask, tied, k.int(), id=f"{name} equal logits")
        yield pytest.param(top_k_mask, logits().bfloat16(), k, id=f"{name} short logits")
        yield pytest.param(top_k_mask, spoilt(), k, id=f"{name} of NaN")
        yield pytest.param(top_k_renorm, logits().softmax(-1), k, id=f"{name} probabilities")
        yield pytest.param(top_k_renorm, tied.softmax(-1), k, id=f"{name} equal ones")
        yield pytest.param(top_k_renorm, sparse(), k, id=f"{name} of zeros")
    wide = torch.randn(4, 2000)[:, 3 : 3 + VOCABULARY]
    yield pytest.param(top_k_mask, wide, few, id="strided")
    yield pytest.param(top_k_mask, logits().sort().values, few, id="all in one part")
    least = torch.tensor([0.0, 0.05, 0.5, 1.0])
    yield pytest.param(min_p_renorm_probs, logits().softmax(-1), least, id="min_p")
    yield pytest.param(min_p_renorm_probs, sparse(), least.flip(0), id="min_p of zeros")


@pytest.mark.skipif(not gpu.INTERPRETED, reason="needs Triton, and a machine without CUDA")
@pytest.mark.parametrize(("op", "values", "parameter"), [*few_and_many(), *shares()])
def test_programs_that_wait_for_each_other(
    op: Op[..., Any], values: Tensor, parameter: Tensor, small_parts: None
) -> None:
    assert_as_defined(op, LAUNCHES[op](values, parameter), values, parameter)


@pytest.mark.skipif(not gpu.INTERPRETED, reason="needs Triton, and a machine without CUDA")
@pytest.mark.parametrize(("op", "values", "parameter"), [*shares()][::2])
def test_draws_of_programs_that_wait_for_each_other(
    op: Op[..., Any], values: Tensor, parameter: Tensor, small_parts: None
) -> None:
    uniform = torch.tensor([0.0, 0.37, 0.71, 1 - 2.0**-24])
    assert_drawn(teams.draw_share(values, parameter, uniform), values, parameter, uniform)


@pytest.mark.skipif(not gpu.INTERPRETED, reason="needs Triton, and a machine without CUDA")
@pytest.mark.parametrize("tied", [False, True])
def test_draws_of_a_part_that_has_several_pieces(tied: bool) -> None:
    torch.manual_seed(7)
    values = torch.randn(3, 1500)
    probs = ((values * 4).round() / 4 if tied else values).softmax(-1)
    top_p, uniform = torch.tensor([0.9, 1.0, 0.7]), torch.tensor([0.1, 0.5, 0.9])
    assert_drawn(teams.draw_share(probs, top_p, uniform), probs, top_p, uniform)


@pytest.mark.skipif(not gpu.INTERPRETED, reason="needs Triton, and a machine without CUDA")
def test_nothing_is_drawn_of_rows_that_are_not_finite_or_empty() -> None:
    rows = torch.tensor([[0.5, INF, 0.25], [0.5, NAN, 0.0], [-NAN, 1.0, 0.0], [0.0, 0.0, 0.0]])
    for share in (0.5, 1.0):
        p = torch.full((4,), share)
        assert teams.draw_share(rows, p, p * 0.9).tolist() == [-1] * 4


@pytest.mark.skipif(not gpu.INTERPRETED, reason="needs Triton, and a machine without CUDA")
@pytest.mark.parametrize("op", [pytest.param(op, id=op.name) for op in LAUNCHES])
def test_many_rows_when_interpreted(op: Op[..., Any]) -> None:
    torch.manual_seed(9)
    values = torch.randn(20, 301)
    probs = values if op is top_k_mask else values.softmax(-1)
    k = torch.randint(1, 51, (20,))
    parameter = k if op in (top_k_mask, top_k_renorm) else torch.rand(20)
    assert_as_defined(op, LAUNCHES[op](probs, parameter), probs, parameter)


@pytest.mark.skipif(not gpu.INTERPRETED, reason="needs Triton, and a machine without CUDA")
def test_rows_that_are_not_finite_keep_all_when_interpreted() -> None:
    rows = torch.tensor([[0.5, INF, 0.25], [0.5, NAN, 0.0]])
    half = rows[:, 0]
    for op, parameter in (
        (top_k_renorm, torch.tensor([1, 1])),
        (min_p_renorm_probs, half),
        (top_p_renorm, half),
        (top_p_renorm, half * 2),
    ):
        got = LAUNCHES[op](rows, parameter)
        assert got[0, [0, 2]].tolist() == [0.0, 0.0]
        assert got[:, 1].isnan().all()
        assert not got[1, 0].isfinite()


@pytest.mark.parametrize("kind", [teams.HOLDING, teams.READING])
@pytest.mark.parametrize("rows", [1, 5, 64, 256, 3000])
@pytest.mark.parametrize("width", [1, 512, 4097, 9001, 100_278, 131_072, 1 << 19])
def test_parts_hold_a_row_and_none_is_empty(
    rows: int, width: int, kind: teams.Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "INTERPRETED", False)
    monkeypatch.setattr(gpu, "processors", lambda _device: 132)
    team = teams._team(torch.empty(rows, width, device="meta"), kind)
    assert team.part <= kind.most
    if kind is teams.HOLDING:
        assert team.part % team.pieces[1] == 0
    else:
        assert team.part == math.prod(team.tiles)
    # The last row may begin just in front of a line of memory.
    longest = width + (0 if width % team.align == 0 else team.align - 1)
    assert (team.parts - 1) * team.part < longest <= team.parts * team.part
    assert team.parts <= 132
    assert (team.late > 0) == (team.parts * rows >= 8 * 132)


@pytest.mark.parametrize("kind", [teams.HOLDING, teams.READING])
@pytest.mark.parametrize(("stride", "align"), [(1000, 32), (1032, 32), (1008, 8), (1001, 1)])
def test_parts_begin_where_both_rows_are_aligned(stride: int, align: int, kind: teams.Kind) -> None:
    rows = torch.empty(3, stride)[:, :1000]
    assert teams._team(rows, kind).align == align


@pytest.mark.skipif(not gpu.AVAILABLE, reason="needs Triton")
@pytest.mark.parametrize(("rows", "seated"), [(1, True), (300, False)])
def test_teams_that_hold_their_parts_are_launched_early_if_all_have_a_place(
    rows: int, seated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "INTERPRETED", False)
    monkeypatch.setattr(gpu, "processors", lambda _device: 132)
    kernels = ("top_k_kernel", "min_p_kernel", "top_p_kernel")
    top_k, min_p, top_p = on_hopper(monkeypatch, teams, *kernels)
    probs, parameter = torch.empty(rows, 9001), torch.empty(rows)
    teams.keep_largest(probs, parameter.long())
    teams.keep_least(probs, parameter)
    teams.keep_share(probs, parameter)
    assert (top_k.early, min_p.early, top_p.early) == ([True], [True], [seated])
    for launched in (top_k, min_p, top_p):
        assert launched.args[0][-1] == launched.early[0], "who is launched early waits"


def given(op: Op[..., Any], rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Rows on the GPU, and a parameter of each."""
    values = torch.randn(rows, width, device="cuda") * 3
    if op is not top_k_mask:
        values = values.softmax(-1)
    if op is min_p_renorm_probs:
        return values, torch.rand(rows, device="cuda") * 0.1
    if op is top_p_renorm:
        return values, torch.rand(rows, device="cuda") * 0.2 + 0.8
    return values, torch.randint(1, 51, (rows,), device="cuda")


OPS = [pytest.param(op, id=op.name) for op in LAUNCHES]


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("rows", "width"),
    [(1, 100_278), (3, 100_277), (7, 32_000), (300, 100_278), (9, 1 << 19), (2000, 9001)],
)
def test_many_programs(op: Op[..., Any], rows: int, width: int) -> None:
    torch.manual_seed(rows)
    values, parameter = given(op, rows, width)
    got = LAUNCHES[op](values, parameter)
    assert_as_defined(op, got, values, parameter)
    if op is top_k_mask:
        short = values.bfloat16()
        assert_as_defined(op, LAUNCHES[op](short, parameter), short, parameter)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [100_278, 40_001])
def test_any_k(width: int) -> None:
    torch.manual_seed(width)
    k = torch.tensor([0, 1, 24, 64, 100, 128, 129, 200, 2000, width // 2, width - 1, width]).cuda()
    rows = torch.randn(len(k), width, device="cuda")
    tied = (rows * 8).round() / 8
    # The largest of a row are all in one of its parts.
    for values in (rows, tied, rows.half(), rows.sort().values):
        assert_as_defined(top_k_mask, teams.mask_logits(values, k), values, k)
    for values in (rows.softmax(-1), tied.softmax(-1)):
        assert_as_defined(top_k_renorm, teams.keep_largest(values, k), values, k)


def assert_any_share(by: Any, width: int, sharpness: float, device: str) -> None:
    """Shares of all sizes, kept and drawn by a module."""
    torch.manual_seed(width)
    ends = [0.0, 1e-6, 0.1, 0.5, 0.8, 0.9, 0.99, 0.9999, 0.9999999, 1.0]
    p = torch.tensor(ends, device=device)
    rows = torch.randn(len(p), width, device=device) * sharpness
    for values in (rows, (rows * 8).round() / 8):
        probs = values.softmax(-1)
        for whole in (probs, probs * 0.75, probs * 1e-35):
            assert_as_defined(top_p_renorm, by.keep_share(whole, p), whole, p)
            for _ in range(3):
                uniform = torch.rand(len(p), device=device)
                assert_drawn(by.draw_share(whole, p, uniform), whole, p, uniform)


def assert_draws_again(by: Any, probs: Tensor, p: Tensor) -> None:
    """A module draws the same in a batch, again and alone."""
    uniform = torch.rand(len(p), device=p.device)
    tokens = by.draw_share(probs, p, uniform)
    assert_drawn(tokens, probs, p, uniform)
    for _ in range(20):
        assert torch.equal(by.draw_share(probs, p, uniform), tokens)
    assert torch.equal(by.draw_share(probs[-1:], p[-1:], uniform[-1:]), tokens[-1:])


@pytest.mark.gpu
@pytest.mark.parametrize("width", [100_278, 40_001, 301, 7])
@pytest.mark.parametrize("sharpness", [0.0, 0.1, 1.0, 3.0, 9.0])
def test_any_share(width: int, sharpness: float) -> None:
    assert_any_share(teams, width, sharpness, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "width"), [(1, 100_278), (3, 100_277), (300, 100_278)])
def test_draws_of_many_programs(rows: int, width: int) -> None:
    torch.manual_seed(rows)
    assert_draws_again(teams, *given(top_p_renorm, rows, width))


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_again_and_beside_other_work(op: Op[..., Any]) -> None:
    # A second stream fills the device with teams too, and with products.
    torch.manual_seed(5)
    values, parameter = given(op, 300, 100_278)
    first = LAUNCHES[op](values, parameter)
    assert_as_defined(op, first, values, parameter)
    product = torch.randn(4096, 4096, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for _ in range(20):
        with torch.cuda.stream(side):
            product @ product
            beside = LAUNCHES[op](values, parameter)
        assert torch.equal(LAUNCHES[op](values, parameter), first)
        torch.cuda.synchronize()
        assert torch.equal(beside, first)


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_a_row_alone_is_as_among_others(op: Op[..., Any]) -> None:
    torch.manual_seed(6)
    values, parameter = given(op, 64, 100_278)
    whole = LAUNCHES[op](values, parameter)
    for row in range(0, 64, 7):
        at = slice(row, row + 1)
        assert torch.equal(LAUNCHES[op](values[at], parameter[at])[0], whole[row])
