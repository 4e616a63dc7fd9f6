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
    """The tokens that a step samples. A row that runs guesses has several consecutive ones.

    Attributes:
        row: [n], the rows.
        number: [n], tokens generated before each; the index of the draw.
    """

    row: Ints
    number: Ints

    @classmethod
    def of(cls, plan: StepPlan) -> Picks:
        """The picks of a plan, in its order."""
        row, _, number, _ = plan.decode
        works = [work for work in plan.work if work.sample]
        if works:
            row = np.concatenate((row, [w.row for w in works for _ in range(w.choices)]))
            drawn = [w.output_index + i for w in works for i in range(w.choices)]
            number = np.concatenate((number, drawn))
        return cls(row, number)


class Draws(NamedTuple):
    """Sampling parameters of n rows: arrays [n], in the order of the arguments of
    `ops.draw_tokens`; `number` is the index of the draw for its seed."""

    temperature: NDArray[np.float32]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    seed: NDArray[np.int64]
    number: NDArray[np.int64]


class _Table:
    """Sampling parameters of all rows as arrays, so that a step gathers those of its rows at once.

    Attributes:
        temperature, top_k, top_p, min_p, seed: see Draws.
        plain_from: number of generated tokens from which on the row's logits are not modified.
        alternatives: number of alternatives reported with the row's tokens; -1: nothing is
            reported.
        watched: whether the selections of the row's queries are reported.
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
        """Write a row's parameters."""
        row, p = opened.row, opened.params
        adjusted = p.penalized or p.logit_bias or p.grammar is not None
        never = np.iinfo(np.int64).max
        self.plain_from[row] = never if adjusted else p.min_tokens
        wanted = -1 if p.logprobs is None else vocab_size if p.logprobs < 0 else p.logprobs
        self.alternatives[row] = wanted
        self.watched[row] = p.selection
        # In a batch with random sampling, temperature 0 makes a greedy row's draw its argmax.
        coldest, hottest = FLOAT32.tiny, FLOAT32.max
        self.temperature[row] = 0.0 if p.greedy else _within(p.temperature, coldest, hottest)
        self.top_k[row] = min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size
        self.top_p[row], self.min_p[row] = p.top_p, p.min_p
        self.seed[row] = _signed(opened.seed)


class _Lookup(NamedTuple):
    """The sampling arrays of some rows, cached because consecutive steps have the same rows.

    Attributes:
        row: [n], the rows; a step with the same array has the same rows.
        watched: indices of rows whose selections are reported.
        reporting: indices of rows with reported log-probabilities.
        counts: number of alternatives of each of these.
        plain_from: see _Table, None where all are 0.
        draws: their sampling parameters, except `number`.
        drawing: whether any row samples randomly; otherwise all are greedy.
    """

    row: Ints
    watched: list[int]
    reporting: list[int]
    counts: list[int]
    plain_from: Ints | None
    draws: Draws
    drawing: bool


class _Asked(NamedTuple):
    """Rows that need more than a draw.

    Attributes:
        row: [n], the rows, as in _Lookup.
        rows: the same as a list.
        penalised: indices of those that are penalised.
        biased: those with a logit bias, or with stop ids that are not allowed yet, by their
            indices.
    """

    row: Ints
    rows: list[int]
    penalised: list[int]
    biased: list[tuple[int, RowOpen]]


class Report(NamedTuple):
    """Log-probabilities of a step's tokens.

    Attributes:
        at: indices of the tokens with reports.
        reported: their log-probabilities.
    """

    at: Sequence[int] = ()
    reported: Reported | None = None

    def logprobs(self) -> dict[int, Alternatives]:
        """Index of a token -> its log-probabilities; waits for the copy."""
        if self.reported is None:
            return {}
        return dict(zip(self.at, self.reported.entries(), strict=True))


class Choice(NamedTuple):
    """The sampled tokens of a step.

    Attributes:
        tokens: [n] int64 on the device, -1 where the logits allow none.
        report: their log-probabilities.
    """

    tokens: Tensor
    report: Report = Report()


class Sampler:
    """Chooses tokens for the rows of a step.

    Args:
        vocab_size: ids below it exist for users; logits hold exactly these.
        num_rows: requests that run at once.
        device: device of the logits.
        group: ranks that have the same logits. Rank 0 samples and broadcasts the tokens; the others
            have no penalties, masks and draws.
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
        """Indices of the picks whose selections are reported."""
        return self._look_up(picks.row).watched

    def plain(self, picks: Picks) -> bool:
        """Whether the tokens depend only on the logits and `draws`."""
        plain_from = self._look_up(picks.row).plain_from
        return plain_from is None or bool((picks.number >= plain_from).all())

    def reports(self, picks: Picks) -> tuple[Sequence[int], Sequence[int]]:
        """Indices of the picks with reported log-probabilities, and the number of alternatives of
        each."""
        known = self._look_up(picks.row)
        return known.reporting, known.counts

    def draws(self, picks: Picks, *, always: bool = False) -> Draws | None:
        """Sampling parameters of the rows; None if all are greedy, unless `always`."""
        known = self._look_up(picks.row)
        return known.draws._replace(number=picks.number) if known.drawing or always else None

    @property
    def alone(self) -> bool:
        """Whether there is one rank."""
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
        """Sample one token for each pick; with guesses a row has several, and `count` must be told
        which are accepted.

        Args:
            logits: [n, V] float32, one row per pick; changed in place.
            picks: the picks.
            draws: their `draws`, on the device.
            masks: grammar masks of some of them.
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
        """Record which of the sampled tokens [n] are accepted, [n] bool."""
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
        """Apply the masks to the logits; only masks are copied to the device."""
        bitmask = send_stacked(list(masks.values()), self.device)
        first, end = min(masks), max(masks) + 1
        if len(masks) == end - first:
            ops.apply_token_bitmask_inplace_cuda(logits[first:end], bitmask)
            return
        rows = self._tensor(list(masks))
        lines = bitmask.new_empty(logits.shape[0], bitmask.shape[1]).index_copy_(0, rows, bitmask)
        ops.apply_token_bitmask_inplace_cuda(logits, lines, rows)

    def _lines(self, numbers: Tensor, at: Sequence[int]) -> Tensor:
        """Rows `at` of a tensor; without a copy if these are all rows."""
        return numbers if len(at) == len(numbers) else numbers[self._tensor(at)]

    def _tensor(self, values: Sequence[object], dtype: torch.dtype = torch.int64) -> Tensor:
        """Copy values to the device without a wait."""
        return send([torch.as_tensor(values, dtype=dtype).numpy()], self.device)[0]


def _biases(
    number: Ints, biased: Sequence[tuple[int, RowOpen]]
) -> list[tuple[tuple[int, int], float]]:
    """Indices and values of logit biases, including -inf for stop ids that are not allowed yet."""
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
