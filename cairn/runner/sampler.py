"""Sampling. Each row draws with its own seed and number of tokens so far, so a request
gets the same tokens in a batch, alone, and after a retraction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cairn import ops
from cairn.distributed.groups import ALONE, Group
from cairn.runner.drafts import Drafts
from cairn.runner.logprobs import Reported
from cairn.runner.penalties import Penalties
from cairn.runner.staging import send, send_stacked
from cairn.runner.step import NO_MASKS, Ints, Masks, RowOpen, StepPlan
from cairn.types import Alternatives, SamplingParams

INT64_MASK = (1 << 64) - 1
FLOAT32 = torch.finfo(torch.float32)


class Picks(NamedTuple):
    """The choices of a step. A row that runs guesses has several, one behind the other.

    Attributes:
        row: [n], the rows.
        number: [n], tokens that each has generated before; names the draw.
    """

    row: Ints
    number: Ints

    @classmethod
    def of(cls, plan: StepPlan) -> Picks:
        """Those of a plan, in its order."""
        row, _, number, _ = plan.decode
        works = [work for work in plan.work if work.sample]
        if works:
            row = np.concatenate((row, [w.row for w in works for _ in range(w.choices)]))
            drawn = [w.output_index + i for w in works for i in range(w.choices)]
            number = np.concatenate((number, drawn))
        return cls(row, number)


class Draws(NamedTuple):
    """How each of n rows draws: arrays [n], in the order of `ops.draw_tokens`' arguments; `number`
    counts the draws of its seed."""

    temperature: NDArray[np.float32]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    seed: NDArray[np.int64]
    number: NDArray[np.int64]


class _Table:
    """The numbers of all rows as arrays, so that a step takes those of its rows at once.

    Attributes:
        temperature, top_k, top_p, min_p, seed: see Draws.
        plain_from: tokens from which on the logits of the row are taken as they come.
        alternatives: how many are reported beside the row's tokens; -1: nothing is reported.
        watched: what the row's queries read is reported.
    """

    def __init__(self, num_rows: int) -> None:
        self.temperature = np.zeros(num_rows, dtype=np.float32)
        self.top_k = np.zeros(num_rows, dtype=np.int64)
        self.top_p = np.zeros(num_rows, dtype=np.float32)
        self.min_p = np.zeros(num_rows, dtype=np.float32)
        self.seed = np.zeros(num_rows, dtype=np.int64)
        self.plain_from = np.zeros(num_rows, dtype=np.int64)
        self.alternatives = np.zeros(num_rows, dtype=np.int64)
        self.watched = np.zeros(num_rows, dtype=np.bool_)

    def fill(self, opened: RowOpen, vocab_size: int) -> None:
        """Write the row's numbers."""
        row, p = opened.row, opened.params
        adjusted = p.penalized or p.logit_bias or p.grammar is not None
        never = np.iinfo(np.int64).max
        self.plain_from[row] = never if adjusted else p.min_tokens
        wanted = -1 if p.logprobs is None else vocab_size if p.logprobs < 0 else p.logprobs
        self.alternatives[row] = wanted
        self.watched[row] = p.selection
        # In a batch that draws, temperature 0 makes a greedy row's draw its argmax.
        coldest, hottest = FLOAT32.tiny, FLOAT32.max
        self.temperature[row] = 0.0 if p.greedy else _within(p.temperature, coldest, hottest)
        self.top_k[row] = min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size
        self.top_p[row], self.min_p[row] = p.top_p, p.min_p
        self.seed[row] = _signed(opened.seed)


class _Lookup(NamedTuple):
    """The sampling arrays of some rows, cached because consecutive steps have the same rows.

    Attributes:
        row: [n], the rows; a step with the same array has the same rows.
        watched: indices of those that want to know what they read.
        reporting: indices of those of which something is reported.
        counts: how many alternatives, of these.
        plain_from: see _Table, None where all are 0.
        draws: how they draw, but for `number`.
        drawing: whether any draws; else all take their most likely token.
    """

    row: Ints
    watched: list[int]
    reporting: list[int]
    counts: list[int]
    plain_from: Ints | None
    draws: Draws
    drawing: bool


class _Asked(NamedTuple):
    """What is asked of some rows beyond a draw.

    Attributes:
        row: [n], the rows, as in _Lookup.
        rows: the same as a list.
        penalised: indices of those that are penalised.
        biased: those with a bias, or with ids that may come too early, by their indices.
    """

    row: Ints
    rows: list[int]
    penalised: list[int]
    biased: list[tuple[int, RowOpen]]


class Report(NamedTuple):
    """What is reported of a step's tokens.

    Attributes:
        at: indices of those of which something is.
        reported: what, of these.
    """

    at: Sequence[int] = ()
    reported: Reported | None = None

    def logprobs(self) -> dict[int, Alternatives]:
        """Index of a token -> what is reported of it; waits for it."""
        if self.reported is None:
            return {}
        return dict(zip(self.at, self.reported.entries(), strict=True))


class Choice(NamedTuple):
    """What a step chooses.

    Attributes:
        tokens: [n] int64 on the device, -1 where the logits allow none.
        report: what is reported of them.
    """

    tokens: Tensor
    report: Report = Report()


class Sampler:
    """Chooses tokens for the rows of a step.

    Args:
        vocab_size: ids below it exist for users; logits hold exactly these.
        num_rows: requests that run at once.
        device: where the logits live.
        group: ranks that have the same logits. Rank 0 chooses and tells the others, which know
            nothing of penalties, masks and draws.
    """

    def __init__(
        self, vocab_size: int, num_rows: int, device: torch.device, group: Group = ALONE
    ) -> None:
        self.vocab_size, self._group = vocab_size, group
        self.device = device
        self._table = _Table(num_rows)
        self._rows: dict[int, RowOpen] = {}
        self._penalties = Penalties(vocab_size, device)
        self._known: _Lookup | None = None
        self._asked: _Asked | None = None

    def open(self, opened: RowOpen) -> None:
        """Reset a row for a new request."""
        self._rows[opened.row] = opened
        self._known = self._asked = None
        self._table.fill(opened, self.vocab_size)
        self._penalties.close(opened.row)
        if opened.params.penalized:
            self._penalties.open(opened)

    def close(self, row: int) -> None:
        """The row's request ended."""
        self._rows.pop(row, None)
        self._penalties.close(row)

    def params(self, row: int) -> SamplingParams:
        """The sampling parameters of the row's request."""
        return self._rows[row].params

    def watched(self, picks: Picks) -> list[int]:
        """Indices of those that want to know what they read."""
        return self._look_up(picks.row).watched

    def plain(self, picks: Picks) -> bool:
        """Whether the tokens follow from the logits and `draws` alone."""
        plain_from = self._look_up(picks.row).plain_from
        return plain_from is None or bool((picks.number >= plain_from).all())

    def reports(self, picks: Picks) -> tuple[Sequence[int], Sequence[int]]:
        """Indices of those of which something is reported, and how many alternatives of each."""
        known = self._look_up(picks.row)
        return known.reporting, known.counts

    def draws(self, picks: Picks, *, always: bool = False) -> Draws | None:
        """How the rows draw; None where all take their most likely token, unless `always`."""
        known = self._look_up(picks.row)
        return known.draws._replace(number=picks.number) if known.drawing or always else None

    @property
    def alone(self) -> bool:
        """This process chooses by itself: there is one rank."""
        return self._group.alone

    def _look_up(self, row: Ints) -> _Lookup:
        known, table = self._known, self._table
        if known is None or known.row is not row:
            plain_from, temperature = table.plain_from[row], table.temperature[row]
            watched: list[int] = table.watched[row].nonzero()[0].tolist()
            wanted = table.alternatives[row]
            reporting = (wanted >= 0).nonzero()[0]
            top = table.top_k[row], table.top_p[row], table.min_p[row]
            known = self._known = _Lookup(
                row,
                watched,
                reporting.tolist(),
                wanted[reporting].tolist(),
                plain_from if plain_from.any() else None,
                Draws(temperature, *top, table.seed[row], row),
                bool(temperature.any()),
            )
        return known

    def sample(
        self,
        logits: Tensor,
        picks: Picks,
        draws: Sequence[Tensor] | None,
        masks: Masks = NO_MASKS,
        drafts: Drafts | None = None,
    ) -> Choice:
        """Choose one token for each row that picks one; with guesses, several, of which those that
        count are to be told by `count`.

        Args:
            logits: [n, V] float32, one line for each of them; changed in place.
            picks: the rows.
            draws: `draws` of them, on the device.
            masks: what some of them may choose.
            drafts: the guesses among them.
        """
        if self._group.rank:
            choice = Choice(logits.new_empty(len(logits), dtype=torch.int64))
        else:
            choice = self._choose(logits, picks, draws, masks, drafts)
        self._group.of_first(choice.tokens)
        return choice

    def _choose(
        self,
        logits: Tensor,
        picks: Picks,
        draws: Sequence[Tensor] | None,
        masks: Masks,
        drafts: Drafts | None,
    ) -> Choice:
        """The choice of `sample`."""
        asked = self._ask(picks.row)
        rows, penalised = asked.rows, asked.penalised
        reporting, counts = self.reports(picks)
        bias = _biases(picks.number, asked.biased) if asked.biased else []
        raw = None
        if reporting:
            raw = self._lines(logits, reporting)
            if raw is logits and (bias or penalised or masks):
                # Reported log-probabilities are the model's, before penalties, bias and filters.
                raw = logits.clone()
        if bias:
            places, values = zip(*bias, strict=True)
            ops.apply_logit_bias(logits, self._tensor(places), self._tensor(values, torch.float32))
        if penalised:
            before = None if drafts is None else drafts.before(penalised)
            self._penalties.apply(logits, rows, penalised, before)
        if masks:
            self._mask(logits, masks)
        tokens = ops.argmax_tokens(logits) if draws is None else ops.draw_tokens(logits, *draws)
        if penalised and drafts is None:
            self._penalties.count(tokens, rows, penalised)
        if raw is None:
            return Choice(tokens)
        reported = Reported.of(raw, self._lines(tokens, reporting), counts)
        return Choice(tokens, Report(reporting, reported))

    def count(self, tokens: Tensor, picks: Picks, kept: Tensor) -> None:
        """Which of the tokens [n] that were chosen count [n] bool."""
        asked = self._ask(picks.row)
        if asked.penalised:
            self._penalties.count(tokens, asked.rows, asked.penalised, kept)

    def _ask(self, row: Ints) -> _Asked:
        asked = self._asked
        if asked is None or asked.row is not row:
            rows: list[int] = row.tolist()
            opened = enumerate(self._rows[n] for n in rows)
            asked = self._asked = _Asked(
                row,
                rows,
                self._penalties.among(rows),
                [(i, o) for i, o in opened if o.params.logit_bias or o.params.min_tokens],
            )
        return asked

    def _mask(self, logits: Tensor, masks: Masks) -> None:
        """Forbid what the masks forbid; only they travel."""
        bitmask = send_stacked(list(masks.values()), self.device)
        first, end = min(masks), max(masks) + 1
        if len(masks) == end - first:
            ops.apply_token_bitmask_inplace_cuda(logits[first:end], bitmask)
            return
        rows = self._tensor(list(masks))
        lines = bitmask.new_empty(logits.shape[0], bitmask.shape[1]).index_copy_(0, rows, bitmask)
        ops.apply_token_bitmask_inplace_cuda(logits, lines, rows)

    def _lines(self, numbers: Tensor, at: Sequence[int]) -> Tensor:
        """Lines `at` of numbers; all of them as they are."""
        return numbers if len(at) == len(numbers) else numbers[self._tensor(at)]

    def _tensor(self, values: Sequence[object], dtype: torch.dtype = torch.int64) -> Tensor:
        """Numbers on the device, without a wait."""
        return send([torch.as_tensor(values, dtype=dtype).numpy()], self.device)[0]


def _biases(
    number: Ints, biased: Sequence[tuple[int, RowOpen]]
) -> list[tuple[tuple[int, int], float]]:
    """Where and what users ask to add, and stop ids that come too early."""
    found: list[tuple[tuple[int, int], float]] = []
    for i, row in biased:
        if row.params.logit_bias:
            found += [((i, token), value) for token, value in row.params.logit_bias.items()]
        if number[i] < row.params.min_tokens:
            found += [((i, token), -torch.inf) for token in row.stop_ids]
    return found


def _within(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def _signed(seed: int) -> int:
    """Any integer as a signed 64-bit one."""
    seed &= INT64_MASK
    return seed - (1 << 64) if seed >> 63 else seed
