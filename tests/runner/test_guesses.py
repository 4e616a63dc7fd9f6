"""Steps with guesses, on a model whose tokens depend on all slots of a row."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from cairn.attention.base import LayerReads
from cairn.attention.registry import cache_schema
from cairn.attention.step import Step
from cairn.cache.landmarks import SlotMap
from cairn.cache.pools import CachePools, PoolSizes
from cairn.cache.schema import CacheSchema, LayerSchema, PageField, PageFormat, RowField
from cairn.runner.runner import Runner, RunnerShape
from cairn.runner.step import (
    NO_ROWS,
    DecodeWork,
    PageGrant,
    RowOpen,
    RowWork,
    StateCopy,
    StepPlan,
    StepResult,
)
from cairn.specs.gqa import GqaSpec
from cairn.types import SamplingParams

SIZE, ROWS, MAX_PAGES, VOCAB, KINDS = 4, 4, 30, 19, 97
CPU = torch.device("cpu")
MIXER = GqaSpec(num_heads=1, num_kv_heads=1, head_dim=16, rotary=None)
GREEDY = SamplingParams(temperature=0)
LOGITS = torch.randn(KINDS + 1, VOCAB, generator=torch.Generator().manual_seed(0)) * 2
# No token is sampled after the end of a page; if one is, it is this.
LOGITS[:, 0] = -100
LOGITS[KINDS, 0] = 100


def kind_of(ids: Sequence[int]) -> int:
    """Determines the token after these slots."""
    return KINDS if ids[-1] == VOCAB else sum((i + 1) * n for i, n in enumerate(ids, 3)) % KINDS


class Model:
    """Stores the ids of slots in place of keys and values, and reads all of a row's."""

    def __init__(self) -> None:
        self.cache = torch.full((ROWS * MAX_PAGES * SIZE,), -1000)
        self.steps: list[Step] = []

    def __call__(self, step: Step) -> Tensor:
        self.steps.append(step)
        batch = step.batch
        (place,) = batch.places
        self.cache[place.location] = batch.input_ids
        kinds = []
        for row, slot in zip(batch.row.tolist(), batch.slot.tolist(), strict=True):
            pages = place.page_table[row, : slot // SIZE + 1].long()
            ids = self.cache.view(-1, SIZE)[pages].flatten()[: slot + 1]
            kinds.append(kind_of(ids.tolist()))
        if batch.watch is not None:
            read = batch.slot[batch.watch].int().view(-1, 1, 1)
            ones = torch.ones(len(read), 1)
            step.layers[0].plan.reads.append(LayerReads(0, read, ones[:, :, None], ones))
        return torch.tensor(kinds, dtype=torch.float32)[:, None]

    def logits(self, hidden: Tensor) -> Tensor:
        return LOGITS[hidden[:, 0].long()].clone()

    @contextlib.contextmanager
    def abridged(self, backends: Sequence[str]) -> Iterator[None]:
        yield


def slots_of(tokens: Sequence[int]) -> list[int]:
    """Ids of slots: the end of a page depends on the token before it."""
    ids: list[int] = []
    for token in tokens:
        ids.append(token)
        if len(ids) % SIZE == SIZE - 1:
            ids.append(VOCAB)
    return ids


def following(tokens: Sequence[int], count: int) -> list[int]:
    """The most likely tokens after these."""
    found = list(tokens)
    for _ in range(count):
        ids = slots_of(found)
        ids = ids[:-1] if ids[-1] == VOCAB else ids
        found.append(int(LOGITS[kind_of(ids)].argmax()))
    return found[len(tokens) :]


class Rows:
    """A runner whose rows have all their pages, and each row's slots and tokens."""

    def __init__(self, params: Sequence[SamplingParams]) -> None:
        schema = cache_schema([MIXER], PageFormat(SIZE, torch.float32))
        pools = CachePools(schema, PoolSizes((ROWS * MAX_PAGES,)), CPU)
        shape = RunnerShape(ROWS, MAX_PAGES, VOCAB, SlotMap(SIZE, True), 16)
        self.model = Model()
        self.runner = Runner(self.model, (MIXER,), pools, shape, CPU)
        rows = range(len(params))
        self.opened = tuple(RowOpen(row, "", params[row], seed=row) for row in rows)
        pages = list(range(ROWS * MAX_PAGES))
        random.Random(1).shuffle(pages)
        share = [tuple(pages[row * MAX_PAGES : (row + 1) * MAX_PAGES]) for row in rows]
        self.grants = tuple(PageGrant(row, 0, share[row]) for row in rows)
        self.tokens: list[list[int]] = [[] for _ in rows]
        self.done, self.made = [0] * len(params), [0] * len(params)

    def run(self, works: Sequence[RowWork], decoding: Sequence[int] = ()) -> StepResult:
        """Run a step and apply the tokens of its rows."""
        result = self.runner.run(self.plan(works, decoding))
        rows = [*decoding, *(work.row for work in works if work.sample)]
        counts, tokens = result.counts or [1] * len(rows), list(result.tokens)
        assert sum(counts) == len(tokens) and len(counts) == len(rows)
        for work in works:
            self.done[work.row] = work.first + work.num_tokens - work.drafts
        for row in decoding:
            self.done[row] += 1
        for row, count in zip(rows, counts, strict=True):
            self.done[row] += count - 1
            self.made[row] += count
            self.tokens[row] += [tokens.pop(0) for _ in range(count)]
        return result

    def plan(self, works: Sequence[RowWork], decoding: Sequence[int] = ()) -> StepPlan:
        first, made = ([column[row] for row in decoding] for column in (self.done, self.made))
        decode = DecodeWork.of(decoding, first, made) if decoding else NO_ROWS
        opened, self.opened = self.opened, ()
        grants, self.grants = self.grants, ()
        return StepPlan(0, (), opened, grants, tuple(works), decode)

    def prefill(self, prompts: Sequence[list[int]]) -> StepResult:
        self.tokens = [list(prompt) for prompt in prompts]
        return self.run([RowWork(row, 0, prompt, True) for row, prompt in enumerate(prompts)])

    def guessing(self, row: int, guesses: Sequence[int]) -> RowWork:
        """The row's last token, which has not run, and guesses after it."""
        given, first = [self.tokens[row][-1], *guesses], self.done[row]
        assert first == len(self.tokens[row]) - 1
        return RowWork(row, first, given, True, self.made[row], drafts=len(guesses))


GUESSERS: dict[str, Callable[[list[int], random.Random], list[int]]] = {
    "right": lambda truth, rng: truth,
    "wrong": lambda truth, rng: [token % (VOCAB - 1) + 1 for token in truth],
    "random": lambda truth, rng: [
        token if rng.random() < 0.7 else rng.randrange(1, VOCAB) for token in truth
    ],
}


@pytest.mark.parametrize("kind", GUESSERS)
@pytest.mark.parametrize("drafts", [1, 2, 3, 7])
def test_tokens_are_those_without_guesses(kind, drafts):
    """For any number of right guesses, and page ends between them."""
    rng, rows = random.Random(drafts), Rows([GREEDY] * 2)
    prompts = [[3, 8], [5, 1, 7, 2, 11, 4]]
    rows.prefill(prompts)
    for _ in range(8):
        truths = [following(tokens, drafts + 1) for tokens in rows.tokens]
        guesses = [GUESSERS[kind](truth[:-1], rng) for truth in truths]
        before = [list(tokens) for tokens in rows.tokens]
        result = rows.run([rows.guessing(row, guesses[row]) for row in range(2)])
        for row, (guess, truth) in enumerate(zip(guesses, truths, strict=True)):
            right = next((i for i in range(drafts) if guess[i] != truth[i]), drafts)
            assert result.counts[row] == right + 1
            assert rows.tokens[row] == before[row] + truth[: right + 1]
            if kind != "random":
                assert right == (drafts if kind == "right" else 0)
    for prompt, tokens in zip(prompts, rows.tokens, strict=True):
        assert tokens == prompt + following(prompt, len(tokens) - len(prompt))


def test_pages_end_among_guesses():
    """A guess that completes a page also runs the end of the page, after which no token is
    sampled."""
    rows = Rows([GREEDY])
    rows.prefill([[3, 8]])
    truth = following(rows.tokens[0], 8)
    rows.run([rows.guessing(0, truth[:7])])
    batch = rows.model.steps[-1].batch
    # Tokens 2 .. 9 in pages of three tokens and an end.
    assert batch.slot.tolist() == list(range(2, 13))
    assert batch.completed.tolist() == [1, 5, 9]
    assert [i for i, n in enumerate(batch.input_ids.tolist()) if n == VOCAB] == [1, 5, 9]
    assert rows.tokens[0] == [3, 8, following([3, 8], 1)[0], *truth]
    assert 0 not in rows.tokens[0]


@pytest.mark.parametrize("kind", GUESSERS)
def test_the_last_token_that_counts_is_the_one_that_runs_next(kind):
    """Alternating steps with guesses and decode steps, whose tokens only the device knows; another
    row is prefilled in chunks, of which only the last one samples."""
    rng, rows = random.Random(3), Rows([GREEDY] * 3)
    prompts = [[3, 8], [9, 2, 6], [rng.randrange(1, VOCAB) for _ in range(11)]]
    rows.tokens = [list(prompt) for prompt in prompts]
    rows.run([RowWork(row, 0, prompts[row], True) for row in (0, 1)])
    for first, end in ((0, 4), (4, 9), (9, 11)):
        truth = following(rows.tokens[0], 3)
        works = [
            RowWork(2, first, prompts[2][first:end], end == 11),
            rows.guessing(0, GUESSERS[kind](truth, rng)),
        ]
        rows.run(works, decoding=[1])
        assert rows.runner.rows.last_token[:2].tolist() == [rows.tokens[r][-1] for r in (0, 1)]
        rows.run([], decoding=[0, 1])
    rows.run([], decoding=[2, 0])
    assert rows.made[2] == 2
    for prompt, tokens in zip(prompts, rows.tokens, strict=True):
        assert tokens == prompt + following(prompt, len(tokens) - len(prompt))


def test_draws_and_reports_are_those_without_guesses():
    """A random number depends on the token's index in the row; a report names the token's place in
    the result."""
    params = [
        SamplingParams(temperature=1.0, logprobs=2),
        SamplingParams(temperature=0.8, top_p=0.9),
        SamplingParams(temperature=0, logprobs=0),
    ]
    prompts, count = [[3, 8], [9, 2, 6], [4]], 24
    plain = Rows(params)
    results = [plain.prefill(prompts)]
    results += [plain.run([], decoding=[0, 1, 2]) for _ in range(count)]
    wanted = {(row, i): r.logprobs[row] for i, r in enumerate(results) for row in (0, 2)}

    rows, rng = Rows(params), random.Random(8)
    result, seen = rows.prefill(prompts), [0, 0, 0]
    while True:
        counts, at = result.counts or [1, 1, 1], 0
        for row, taken in enumerate(counts):
            for _ in range(taken):
                assert (at in result.logprobs) == (row != 1)
                if row != 1:
                    got, report = result.logprobs[at], wanted[row, seen[row]]
                    assert got.chosen == pytest.approx(report.chosen)
                    assert list(got.ids) == list(report.ids)
                seen[row] += 1
                at += 1
        assert len(result.logprobs) == sum(counts) - counts[1]
        if max(rows.made) + 4 > count:
            break
        works = []
        for row in range(3):
            truth = plain.tokens[row][len(rows.tokens[row]) :][: rng.randrange(4)]
            works.append(rows.guessing(row, GUESSERS["random"](truth, rng)))
        result = rows.run(works)
    for mine, all_of_them in zip(rows.tokens, plain.tokens, strict=True):
        assert mine == all_of_them[: len(mine)]
    assert max(rows.made) > 12


def test_selections_are_reported_for_accepted_tokens():
    rows = Rows([GREEDY, SamplingParams(temperature=0, selection=True)])
    rows.prefill([[3, 8], [5, 6, 7, 8]])
    truths = [following(tokens, 3) for tokens in rows.tokens]
    wrong = GUESSERS["wrong"](truths[0], random.Random(0))
    works = [rows.guessing(0, wrong), rows.guessing(1, [*truths[1][:2], 1 + truths[1][2] % 18])]
    result = rows.run(works)
    assert list(result.counts) == [1, 3]
    # Tokens 4, 5 and 6 are in slots 5, 6 and 8.
    read = {i: [layer.pages for layer in layers] for i, layers in result.selection.items()}
    assert read == {1: [(5,)], 2: [(6,)], 3: [(8,)]}


def test_a_choice_under_a_mask_may_refuse_a_guess():
    rows = Rows([GREEDY, GREEDY])
    rows.prefill([[3, 8], [9]])
    truth = following(rows.tokens[0], 3)
    plan = rows.plan([rows.guessing(0, truth), rows.guessing(1, [])])
    launched = rows.runner.launch(plan._replace(constrained=[1]))
    allowed = next(token for token in range(1, VOCAB) if token != truth[1])
    launched.choose({1: np.array([1 << allowed], dtype=np.int32)})
    result = launched.result()
    assert list(result.counts) == [2, 1]
    assert list(result.tokens) == [truth[0], allowed, *following(rows.tokens[1], 1)]
    assert rows.runner.rows.last_token[:2].tolist() == list(result.tokens)[1:]


class Counting(Model):
    """Adds the ids of a row's slots to the row's state."""

    def __call__(self, step: Step) -> Tensor:
        batch = step.batch
        state = step.layers[0].backend.pools.rows[0]["state"]
        state.index_add_(0, batch.row, batch.input_ids.float())
        return super().__call__(step)


def test_states_are_restored_before_a_step_and_kept_behind_it():
    pages = tuple(PageField(name, (1, SIZE, 16), torch.float32) for name in "kv")
    layer = LayerSchema(pages, (RowField("state", (), torch.float32),))
    sizes = PoolSizes((ROWS * MAX_PAGES,), rows=ROWS, snapshots=3)
    pools = CachePools(CacheSchema([layer], SIZE), sizes, CPU)
    (state,) = pools.states()
    state.zero_()
    shape = RunnerShape(ROWS, MAX_PAGES, VOCAB, SlotMap(SIZE, False), 16)
    runner = Runner(Counting(), (MIXER,), pools, shape, CPU)
    opened = tuple(RowOpen(row, "", GREEDY, seed=0) for row in (0, 2))
    grants = (PageGrant(0, 0, (1, 2)), PageGrant(2, 0, (3, 4)))
    works = (RowWork(0, 0, [3, 4], False), RowWork(2, 0, [10], False))
    runner.run(StepPlan(0, (), opened, grants, works, kept=(StateCopy(0, 2), StateCopy(2, 0))))
    assert state.tolist() == [7, 0, 10, 0, 0, 10, 0, 7]
    works = (RowWork(2, 1, [5], False),)
    runner.run(StepPlan(1, (), (), (), works, restored=(StateCopy(2, 2),), kept=(StateCopy(2, 1),)))
    assert state.tolist() == [7, 0, 12, 0, 0, 10, 12, 7]
