"""One request inside the engine: user tokens only."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from cairn.cache.paged import Lease
from cairn.cache.radix import Mark
from cairn.engine.grammar import GrammarState
from cairn.engine.messages import Timing
from cairn.runner.media import PromptMedia
from cairn.runner.step import DecodeWork, RowWork
from cairn.types import SamplingParams


class State(Enum):
    """The state of a request."""

    LOADING = "loading"
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True)
class Moments:
    """Time stamps of a request, in seconds of the engine's clock; None: not reached.

    Attributes:
        arrived: it was queued.
        started: its first step began.
        first_token, last_token: the steps ended that chose them.
        ended: the output ended.
    """

    arrived: float
    started: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None

    @property
    def timing(self) -> Timing | None:
        """Seconds per phase; None while the request runs. Phases that were not reached count 0."""
        if self.ended is None:
            return None
        started = self.ended if self.started is None else self.started
        first = self.ended if self.first_token is None else self.first_token
        last = first if self.last_token is None else self.last_token
        return Timing(started - self.arrived, first - started, last - first)


class RowCounts:
    """Progress of the running requests by row, in user tokens; arrays, because decoding rows
    advance together.

    Attributes:
        computed: tokens whose keys and values are in the cache, but for those that
            decoded since.
        planned: all of them, and the tokens that steps in flight compute.
        capacity: tokens that the row's pages hold.
        prompt: tokens of the prompt.
        last: `planned` once steps in flight choose the last token that the request may have.
    """

    def __init__(self, num_rows: int) -> None:
        self.computed = np.zeros(num_rows, dtype=np.int64)
        self.planned = np.zeros(num_rows, dtype=np.int64)
        self.capacity = np.zeros(num_rows, dtype=np.int64)
        self.prompt = np.zeros(num_rows, dtype=np.int64)
        self.last = np.zeros(num_rows, dtype=np.int64)

    def start(self, request: Request, computed: int) -> None:
        """Set the counts of a request that takes its row; its pages hold `computed` tokens, all
        computed."""
        row = request.row
        request.counts = self
        self.computed[row] = self.planned[row] = self.capacity[row] = computed
        self.prompt[row] = request.num_prompt
        self.last[row] = request.most_computed


@dataclass(slots=True, eq=False)
class Request:
    """A request as the scheduler sees it.

    Attributes:
        id: unique name.
        num_prompt: user tokens of the prompt.
        params: how to sample.
        seed: base of the draws.
        stop_ids: ids that end the output.
        max_output: tokens that may be generated.
        order: (priority, arrival); the smaller goes first.
        output: the tokens generated; EngineCore appends them.
        cached: prompt tokens taken from the prefix cache when it first ran.
        row: row of the page table while running.
        counts: how far that row is.
        lease: its pages while running.
        granted: pages of the lease that the runner knows.
        opened: whether the runner knows the row.
        decoding: all that is left to run is the token that was chosen last, since the row was
            opened.
        verifying: its latest work in flight, if that runs guesses: the number of accepted tokens is
            known when that step retires.
        stale: the device's last token of its row is not its own, since a step ran ahead of wrong
            guesses.
        guesses: the draft layer's guesses after its tokens.
        others: the likeliest of its first guesses.
        right, tried: decayed counts of its right guesses and of its verified guesses.
        doomed: to be released when the steps in flight have retired.
        failed: one of its steps failed: later steps already in flight depend on what was lost.
        held_by: a running request that is computing `held_until` tokens this one shares.
        retractions: how often its pages were taken back.
        grammar: the state of its grammar; None: unconstrained.
        media: images and videos of the prompt; None: it is text.
    """

    id: str
    num_prompt: int
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    max_output: int
    order: tuple[int, int]
    prompt: InitVar[Sequence[int]]
    output: list[int] = field(default_factory=list)
    state: State = State.WAITING
    cached: int | None = None
    row: int = -1
    counts: RowCounts | None = field(default=None, repr=False)
    lease: Lease | None = None
    granted: int = 0
    opened: bool = False
    decoding: bool = False
    verifying: RowWork | None = None
    stale: bool = False
    guesses: Sequence[int] = ()
    others: Sequence[int] = ()
    right: float = 0.0
    tried: float = 0.0
    doomed: bool = False
    failed: bool = False
    held_by: Request | None = None
    held_until: int = 0
    retractions: int = 0
    grammar: GrammarState | None = None
    media: PromptMedia | None = None
    _tokens: array[int] = field(init=False, repr=False)
    _view: NDArray[np.int32] | None = field(default=None, repr=False)

    def __post_init__(self, prompt: Sequence[int]) -> None:
        self._tokens = array("i", prompt)
        # Memory for the output is allocated now: moving a long prompt between two steps would take
        # too long.
        self._tokens.append(0)
        self._tokens.pop()

    @property
    def tokens(self) -> array[int]:
        """Prompt and output as 32-bit numbers, append only."""
        missing = self.num_prompt + len(self.output) - len(self._tokens)
        if missing > 0:
            self._tokens.extend(self.output[-missing:])
        return self._tokens

    @property
    def marks(self) -> Sequence[Mark]:
        """Digests of the media behind its placeholder tokens; part of page keys."""
        return () if self.media is None else self.media.marks

    @property
    def computed(self) -> int:
        """User tokens whose keys and values are in the cache, but for those that
        decoded since."""
        return 0 if self.counts is None else int(self.counts.computed[self.row])

    @property
    def planned(self) -> int:
        """All of them, and the tokens that steps in flight compute."""
        return 0 if self.counts is None else int(self.counts.planned[self.row])

    @property
    def choosing(self) -> int:
        """Number of tokens that steps in flight choose, not known yet; they follow `tokens`."""
        return self.planned + 1 - len(self.tokens) if self.decoding else 0

    @property
    def most_computed(self) -> int:
        """Most tokens that will ever be in the cache: the last generated one is not run."""
        return self.num_prompt + self.max_output - 1

    @property
    def num_output(self) -> int:
        """Tokens generated so far, those in flight included."""
        return len(self.tokens) + self.choosing - self.num_prompt

    @property
    def pending(self) -> int:
        """Number of user tokens that are known, or being chosen, and that no step computes yet."""
        return len(self.tokens) + self.choosing - self.planned

    @property
    def complete(self) -> bool:
        """Whether steps in flight choose its last possible token."""
        return self.decoding and self.planned + 1 - self.num_prompt >= self.max_output

    @property
    def asks_more(self) -> bool:
        """Whether it needs more than independently sampled tokens (log-probabilities, grammar and
        the like)."""
        params = self.params
        reported = params.selection or params.logprobs is not None
        constrained = params.penalized or self.grammar is not None
        return reported or constrained or self.media is not None

    @property
    def caches_prefix(self) -> bool:
        """Whether it may take computed pages; prompt log-probabilities need every position run."""
        return self.params.prompt_logprobs is None

    def prompt_view(self) -> NDArray[np.int32]:
        """The prompt as an array, made once."""
        if self._view is None:
            # A copy: an array view would prevent `tokens` from growing.
            self._view = np.array(self.tokens[: self.num_prompt], dtype=np.int32)
        return self._view


class Lockstep:
    """Rows that decode together: a step advances all of them by one token, so context lengths and
    page borders of the next steps are known beforehand.

    Args:
        requests: the requests of the rows.
        counts: their progress.
        tokens_per_page: user tokens of a page.

    Attributes:
        requests: of the rows, in their order; not to be changed.
        rows: [n], the rows' numbers.
        context: sum of the context lengths of the next step.
        left: steps until one of them reaches its maximum length.
        constrained: those with a grammar, by their indices.
    """

    __slots__ = (
        "_counts",
        "_first",
        "_number",
        "_offset",
        "_size",
        "_starting",
        "constrained",
        "context",
        "left",
        "requests",
        "rows",
    )

    def __init__(self, requests: list[Request], counts: RowCounts, tokens_per_page: int) -> None:
        rows = np.array([r.row for r in requests], dtype=np.int64)
        first = counts.planned[rows]
        self.requests, self.rows = requests, rows
        self.constrained = {i: r for i, r in enumerate(requests) if r.grammar is not None}
        self.context = int(first.sum())
        self.left = int((counts.last[rows] - first).min()) if requests else 0
        self._counts, self._size = counts, tokens_per_page
        self._first, self._number = first, first + 1 - counts.prompt[rows]
        # Steps from now (modulo the page size) -> rows whose token is then the first of a page.
        self._offset = 0
        self._starting: dict[int, list[int]] = {}
        for i, steps in enumerate((-first % tokens_per_page).tolist()):
            self._starting.setdefault(steps, []).append(i)

    def starting(self) -> Sequence[int]:
        """Indices of the rows whose next token is the first of a page."""
        return self._starting.get(self._offset, ())

    def step(self) -> DecodeWork:
        """Advance every row by one planned token."""
        first, number = self._first, self._number
        self._offset = (self._offset + 1) % self._size
        work = DecodeWork(self.rows, first, number, self.starting())
        self._first, self._number = first + 1, number + 1
        self._counts.planned[self.rows] = self._first
        self.context += len(self.requests)
        self.left -= 1
        return work


@dataclass(frozen=True, slots=True)
class Phases:
    """The running requests, in order, split into decoding and prefilling.

    Attributes:
        decoding: next run their last chosen token.
        prefilling: next run known tokens.
    """

    decoding: Lockstep
    prefilling: list[Request]

    @classmethod
    def of(cls, running: Sequence[Request], counts: RowCounts, tokens_per_page: int) -> Phases:
        """Classify them; requests that are to be released, or have all their tokens, are in
        neither."""
        live = [r for r in running if not r.doomed]
        decoding = [r for r in live if r.decoding and not (r.verifying or r.complete)]
        prefilling = [r for r in live if not r.decoding]
        return cls(Lockstep(decoding, counts, tokens_per_page), prefilling)
