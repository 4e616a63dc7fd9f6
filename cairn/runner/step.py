"""What the scheduler asks for and what comes back: frozen values without tensors.

A plan can be written by hand in a test, kept, and replayed. It counts in user tokens; slots and
the ends of pages follow from them by the arithmetic of `cairn.cache.landmarks`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from cairn.runner.media import PromptMedia
from cairn.types import Alternatives, LayerSelection, LogprobColumns, SamplingParams


@dataclass(frozen=True, slots=True)
class RowOpen:
    """A request takes a row of the page table.

    Attributes:
        row: the row's number.
        request_id: whose it is, for logs.
        params: how to sample.
        seed: base of the row's draws.
        history: prompt tokens, and tokens generated before a retraction: what penalties count.
            Empty unless the parameters ask for penalties.
        num_prompt: how many of `history` belong to the prompt.
        stop_ids: ids that may not be chosen before `params.min_tokens` tokens.
        media: images and videos of the prompt; None: it is text.
    """

    row: int
    request_id: str
    params: SamplingParams
    seed: int
    history: Sequence[int] = ()
    num_prompt: int = 0
    stop_ids: tuple[int, ...] = ()
    media: PromptMedia | None = None


class PageGrant(NamedTuple):
    """Physical pages added to a row: logical pages `first`, `first + 1`, ...

    Attributes:
        window: for the last of these logical pages, those of the layers that have pages of their
            own; empty in a model without such layers.
    """

    row: int
    first: int
    pages: tuple[int, ...]
    window: tuple[int, ...] = ()


Ints = NDArray[np.int64]
Masks = Mapping[int, NDArray[np.int32]]
"""Index in a step's choices -> those that may be chosen, [ceil(V / 32)]: bit b of word w stands for
token 32 * w + b. All others may choose any."""
NO_MASKS: Masks = MappingProxyType({})


class StateCopy(NamedTuple):
    """State of a row's recurrent layers, and the snapshot that it is copied from or to."""

    row: int
    snapshot: int


class RowWork(NamedTuple):
    """User tokens of one row that run in this step; the end of a page that they fill rides along.

    Attributes:
        row: the row's number.
        first: user tokens of the row that have run before.
        tokens: the ids to run; None: the one token that was sampled last (a row of `DecodeWork`).
        sample: choose the token that follows the last one.
        output_index: number of tokens generated so far; names the draw.
        prompt_targets: for each of `tokens` the prompt token that follows it, when prompt
            log-probabilities are wanted; one shorter at the end of the prompt.
        drafts: so many of `tokens`, the last ones, are guesses. The row chooses a token behind each
            of them and before the first, and keeps those up to the first that differs from the
            guess in its place: 1 to drafts + 1 tokens.
        ahead: guesses that a draft layer should make behind what the row chooses; the row's pages
            hold so many tokens behind those that run.
        branches: other guesses, no longer than `drafts`, each of which the row runs in their place
            as well. All end in the page in which they begin, and the row has a page more for each.
            The row keeps the tokens of those of which the most are right.
    """

    row: int
    first: int
    tokens: Sequence[int] | None
    sample: bool
    output_index: int = 0
    prompt_targets: Sequence[int] = ()
    drafts: int = 0
    ahead: int = 0
    branches: Sequence[Sequence[int]] = ()

    @property
    def drafted(self) -> int:
        """Guesses, those of branches included."""
        return self.drafts + sum(map(len, self.branches))

    @property
    def guesses(self) -> Sequence[int]:
        """The guesses."""
        return self.tokens[-self.drafts :] if self.tokens is not None and self.drafts else ()

    @property
    def decodes(self) -> bool:
        """All that runs is the row's last token, and guesses."""
        if self.tokens is None:
            return True
        return self.output_index > 0 and len(self.tokens) == 1 + self.drafts

    @property
    def choices(self) -> int:
        """Tokens that the row chooses, before guesses are compared with them."""
        return self.drafts + 1 if self.sample else 0

    @property
    def num_tokens(self) -> int:
        """User tokens that run."""
        return 1 if self.tokens is None else len(self.tokens)


class DecodeWork(NamedTuple):
    """Rows that run the one token that was sampled last in each, and choose the next. They stand
    side by side, since most steps are nothing else and one by one they would cost more than all
    else that the host does.

    Attributes:
        row: [n], the rows' numbers.
        first: [n], user tokens of each that have run before.
        output_index: [n], numbers of tokens generated so far; name the draws.
        full: indices in these whose tokens fill their pages; None: not worked out.
    """

    row: Ints
    first: Ints
    output_index: Ints
    full: Sequence[int] | None = None

    @classmethod
    def of(cls, rows: Sequence[int], first: Sequence[int], output_index: Sequence[int]) -> Self:
        """Written by hand."""
        row, begin, number = (np.array(p, dtype=np.int64) for p in (rows, first, output_index))
        return cls(row, begin, number)

    def count_full(self, tokens_per_page: int) -> int:
        """How many of the tokens fill their pages."""
        if self.full is not None:
            return len(self.full)
        return int(np.count_nonzero(self.first % tokens_per_page == tokens_per_page - 1))


NO_ROWS = DecodeWork.of((), (), ())


class StepPlan(NamedTuple):
    """One forward pass. Rows are closed first, then opened, then granted pages and restored states,
    then run: those that decode, then those of `work`, whose tokens are given.

    Attributes:
        constrained: indices in the step's choices of those that are made under masks, which may
            depend on tokens that a step in flight chooses: see Launched.choose.
        restored: states that rows go on from.
        kept: states that are kept behind the last tokens of their rows.
    """

    step_id: int
    closed: tuple[int, ...]
    opened: tuple[RowOpen, ...]
    grants: tuple[PageGrant, ...]
    work: tuple[RowWork, ...]
    decode: DecodeWork = NO_ROWS
    constrained: Sequence[int] = ()
    restored: tuple[StateCopy, ...] = ()
    kept: tuple[StateCopy, ...] = ()

    @property
    def ahead(self) -> Ints:
        """Guesses that a draft layer should make behind each row that chooses a token [n]."""
        works = [work.ahead for work in self.work if work.sample]
        return np.array([0] * len(self.decode.row) + works, dtype=np.int64)

    def row_by_row(self) -> list[RowWork]:
        """Everything that runs, in order."""
        columns = (self.decode.row, self.decode.first, self.decode.output_index)
        decoding = [
            RowWork(row, first, None, True, index)
            for row, first, index in zip(*(column.tolist() for column in columns), strict=True)
        ]
        return [*decoding, *self.work]


@dataclass(frozen=True, slots=True)
class PromptReport:
    """Log-probabilities of prompt tokens first, first + 1, ... of a row, part by part."""

    row: int
    first: int
    parts: tuple[LogprobColumns, ...]


class StepResult(NamedTuple):
    """What a step produced.

    Attributes:
        step_id: the plan's number.
        tokens: of each row that decodes and each work with `sample`, in the plan's order; -1 where
            the logits allow none.
        counts: how many of them each of these got; None: one each.
        logprobs: index in `tokens` -> what is reported of it, for the works that asked for it.
        selection: index in `tokens` -> what its query read in each layer that selects, likewise.
        prompt_logprobs: for the works that asked for it.
        model_seconds: time that the host gave to the model: running it, or waiting for it.
        guesses: of each row that decodes and each work with `sample`, what a draft layer guesses
            behind its tokens: as many as it should, see `RowWork.ahead`. None: it does not guess.
        others: likewise, the likeliest of its first guesses; None: nobody asked.
    """

    step_id: int
    tokens: Sequence[int]
    logprobs: Mapping[int, Alternatives] = MappingProxyType({})
    selection: Mapping[int, tuple[LayerSelection, ...]] = MappingProxyType({})
    prompt_logprobs: tuple[PromptReport, ...] = ()
    model_seconds: float = 0.0
    counts: Sequence[int] | None = None
    guesses: Sequence[Sequence[int]] | None = None
    others: Sequence[Sequence[int]] | None = None


class Launched(Protocol):
    """A step on its way."""

    def choose(self, masks: Masks) -> None:
        """Under which masks a plan's constrained tokens are chosen; one without a mask may be any.

        Asked of steps with such tokens, once: before the result, and before another step is
        launched.
        """

    def result(self) -> StepResult:
        """Wait for the step and give what it produced."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A step that has run."""

    value: StepResult

    def choose(self, masks: Masks) -> None:
        """Its tokens are chosen already."""

    def result(self) -> StepResult:
        """What it produced."""
        return self.value
