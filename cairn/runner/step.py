"""The scheduler's plans and the runner's results: frozen values without tensors.

A plan can be written by hand in a test, stored, and replayed. It counts in user tokens; slots and
landmarks follow from them by the arithmetic of `cairn.cache.landmarks`.
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
        request_id: its request, for logs.
        params: how to sample.
        seed: base of the row's draws.
        history: prompt tokens, and tokens generated before a retraction: what penalties count.
            Empty unless the parameters ask for penalties.
        num_prompt: number of prompt tokens in `history`.
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
        window: for the last of these logical pages, the pages of window layers; empty in a model
            without such layers.
    """

    row: int
    first: int
    pages: tuple[int, ...]
    window: tuple[int, ...] = ()


Ints = NDArray[np.int64]
Masks = Mapping[int, NDArray[np.int32]]
"""Index of a sampled token -> mask of allowed tokens, [ceil(V / 32)]: bit b of word w stands for
token 32 * w + b. Tokens without a mask are unconstrained."""
NO_MASKS: Masks = MappingProxyType({})


class StateCopy(NamedTuple):
    """A copy of a row's recurrent state from or to a snapshot."""

    row: int
    snapshot: int


class RowWork(NamedTuple):
    """User tokens of one row that run in this step; the landmark of a page that they fill runs with
    them.

    Attributes:
        row: the row's number.
        first: user tokens of the row that have run before.
        tokens: the ids to run; None: the one token that was sampled last (a row of `DecodeWork`).
        sample: whether to sample the token after the last one.
        output_index: number of tokens generated so far; the index of the draw.
        prompt_targets: for each of `tokens` the prompt token that follows it, when prompt
            log-probabilities are wanted; one shorter at the end of the prompt.
        drafts: number of guesses, the last of `tokens`. The row samples a token before the first
            guess and after each, and keeps those up to the first that differs from the guess at its
            position: 1 to drafts + 1 tokens.
        ahead: number of guesses that a draft layer should make after the sampled token; the row's
            pages have space for them.
        branches: alternative guesses, no longer than `drafts`, which the row also runs at the same
            positions. All end in the page in which they begin, and the row has one page more for
            each. The row keeps the tokens of the chain with the most right guesses.
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
        """Number of guesses, including those of branches."""
        return self.drafts + sum(map(len, self.branches))

    @property
    def guesses(self) -> Sequence[int]:
        """The guesses."""
        return self.tokens[-self.drafts :] if self.tokens is not None and self.drafts else ()

    @property
    def decodes(self) -> bool:
        """Whether only the row's last token and guesses run."""
        if self.tokens is None:
            return True
        return self.output_index > 0 and len(self.tokens) == 1 + self.drafts

    @property
    def choices(self) -> int:
        """Number of tokens that the row samples, before they are compared with guesses."""
        return self.drafts + 1 if self.sample else 0

    @property
    def num_tokens(self) -> int:
        """Number of user tokens that run."""
        return 1 if self.tokens is None else len(self.tokens)


class DecodeWork(NamedTuple):
    """Rows that each run their last sampled token and sample the next one. Stored as arrays,
    because most steps only decode, and objects per row would dominate the host's time.

    Attributes:
        row: [n], the rows' numbers.
        first: [n], user tokens of each that have run before.
        output_index: [n], numbers of tokens generated so far; the indices of the draws.
        full: indices of the rows whose token fills its page; None: not computed.
    """

    row: Ints
    first: Ints
    output_index: Ints
    full: Sequence[int] | None = None

    @classmethod
    def of(cls, rows: Sequence[int], first: Sequence[int], output_index: Sequence[int]) -> Self:
        """Build it from plain sequences, for tests."""
        row, begin, number = (np.array(p, dtype=np.int64) for p in (rows, first, output_index))
        return cls(row, begin, number)

    def count_full(self, tokens_per_page: int) -> int:
        """Number of tokens that fill their pages."""
        if self.full is not None:
            return len(self.full)
        return int(np.count_nonzero(self.first % tokens_per_page == tokens_per_page - 1))


NO_ROWS = DecodeWork.of((), (), ())


class StepPlan(NamedTuple):
    """One forward pass. Rows are closed first, then opened, then granted pages and restored states,
    then run: those that decode, then those of `work`, whose tokens are given.

    Attributes:
        constrained: indices of the sampled tokens that need masks, which may depend on tokens of a
            step in flight: see Launched.choose.
        restored: states that rows resume from.
        kept: snapshots taken after the last tokens of rows.
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
        """Number of guesses that a draft layer should make after each row that samples [n]."""
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
    """The result of a step.

    Attributes:
        step_id: the plan's number.
        tokens: of each row that decodes and each work with `sample`, in the plan's order; -1 where
            the logits allow none.
        counts: number of tokens of each; None: one each.
        logprobs: index in `tokens` -> its log-probabilities, for the works that request them.
        selection: index in `tokens` -> the pages that its query selected in each layer, likewise.
        prompt_logprobs: for the works that request them.
        model_seconds: host time for the model: running it, or waiting for it.
        guesses: of each row that decodes and each work with `sample`, the draft layer's guesses
            after its tokens, see `RowWork.ahead`. None: no guesses.
        others: likewise, the most likely first guesses; None: not requested.
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
    """A launched step."""

    def choose(self, masks: Masks) -> None:
        """Sample with these masks for the plan's constrained tokens; tokens without a mask are
        unconstrained.

        Called once for steps with such tokens, before the result is read and before another step is
        launched.
        """

    def result(self) -> StepResult:
        """Wait for the step and return its result."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A step that has run."""

    value: StepResult

    def choose(self, masks: Masks) -> None:
        """No effect: its tokens are sampled already."""

    def result(self) -> StepResult:
        """The result."""
        return self.value
