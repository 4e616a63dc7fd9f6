"""Runs a model's draft layer: keeps its cache in step with the model's and drafts tokens.

Slot s of its cache belongs to the pair of token s and of the hidden state in front of it, one later
than the pair's state. So what a page holds follows from the prefix that the page ends, and pages
are shared as they are. A row goes on from the state behind its last token; where it goes on from
shared pages, that is the one that the last of them keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from cairn import ops
from cairn.attention.base import DRAFT_STATE
from cairn.attention.batch import Batch, PagePlace
from cairn.attention.cuts import decode_cuts
from cairn.attention.registry import Backends
from cairn.attention.step import BoundLayer, Step
from cairn.cache.pools import CachePools
from cairn.runner.rows import Layout, Rows
from cairn.runner.staging import send
from cairn.runner.step import Ints, RowOpen


class DraftModel(Protocol):
    """What the draft head needs of a model, see `cairn.models.decoder.Decoder`."""

    def draft_states(self, hidden: Tensor) -> Tensor:
        """Hidden states of a step -> what the draft layer reads of them [T, width]."""

    def embedded(self, batch: Batch) -> Tensor:
        """[T, hidden], the tokens of a step."""

    def guess(
        self, embedded: Tensor, states: Tensor, positions: Tensor, layer: BoundLayer
    ) -> Tensor:
        """Tokens [T, hidden] and states [T, width] -> [T, width]."""

    def guess_logits(self, guessed: Tensor) -> Tensor:
        """[n, width] -> [n, V] float32."""

    def next_states(self, guessed: Tensor) -> Tensor:
        """[n, width] -> what the draft layer reads of them next [n, width]."""


class Ends(NamedTuple):
    """Where the rows of a step end that choose tokens.

    Attributes:
        row: [n] int64 on the device, the rows.
        at: [n] int64 on the device, index in the step of the last token of each that counts.
        token: [n] int64 on the device, the tokens chosen behind these.
        ahead: [n], how many guesses are wanted behind each of these.
    """

    row: Tensor
    at: Tensor
    token: Tensor
    ahead: Ints


class Chains(NamedTuple):
    """Where the rows of a step in a graph end: of each entry, what it is if the row ends there.

    Attributes:
        row: [n] int64, the row; behind all others, where none ends.
        at: [n] int64, index in the step of the entry's token.
        token: [n] int64, the token chosen behind it.
        ahead: [n] int64, how many guesses are wanted behind that.
        spare: by page group, location of what is for nobody.
    """

    row: Tensor
    at: Tensor
    token: Tensor
    ahead: Tensor
    spare: Sequence[int]


class DraftHead:
    """The draft layer of a model, which is the last of its cache's.

    Args:
        model: has the layer.
        backends: of all layers.
        pools: the cache.
        rows: page tables.
    """

    def __init__(
        self, model: DraftModel, backends: Backends, pools: CachePools, rows: Rows
    ) -> None:
        self._model, self._backends, self._rows = model, backends, rows
        self._layer = len(backends.names) - 1
        self._group = pools.schema.group_of[self._layer][DRAFT_STATE]
        self._kept = pools.pages[self._layer][DRAFT_STATE]
        # Outside graphs all slots are somebody's.
        self._nowhere = [0] * len(rows.page_tables)
        shape = len(rows.last_token), self._kept.shape[1]
        self._last = torch.zeros(shape, dtype=self._kept.dtype, device=rows.device)

    def begin(
        self, opened: Sequence[RowOpen], layout: Layout, step: Step, hidden: Tensor
    ) -> Tensor:
        """`follow` a step of which the host knows the rows.

        Args:
            opened: rows that begin, or go on from pages, with this step.
            layout, step: what has run.
            hidden: [T, ...], what the model has made of it.
        Returns:
            [T, width], what the layer reads of that.
        """
        number, requests = layout.rows.row, self._rows.num_requests
        self.resume(opened, number, layout.rows.first)
        branches = number[number >= requests]
        if len(branches):
            # They go on from where their rows are.
            to, own = send((branches, branches % requests), hidden.device)
            self._last[to] = self._last[own]
        states = self.follow(step, hidden)
        row, last = send((number, layout.last), states.device)
        self._last[row] = states[last]
        return states

    def follow(self, step: Step, hidden: Tensor) -> Tensor:
        """Run the draft layer over the tokens that the model has run: what it reads of their hidden
        states [T, width], for `begin` and graphs."""
        batch, states = step.batch, self._model.draft_states(hidden)
        row = batch.row
        begins = torch.cat((torch.ones_like(row[:1], dtype=torch.bool), row[1:] != row[:-1]))
        before = torch.where(begins[:, None], self._last[row], states.roll(1, 0))
        embedded, layer = self._model.embedded(batch), step.layers[self._layer]
        self._model.guess(embedded, before, batch.positions, layer)
        # In graphs there are pages of padding, the last of all.
        self._kept[batch.completed_pages] = states[batch.completed]
        return states

    def chain(self, step: Step, states: Tensor, chains: Chains, most: int) -> Tensor:
        """Guess in a graph, where nothing depends on how many rows end where.

        Args:
            step: what has run.
            states: from `follow`.
            chains: of its rows.
            most: guesses behind each.
        Returns:
            [n, most] int64; numbers behind those wanted, and where no row ends, mean nothing.
        """
        self._last[chains.row] = state = states[chains.at]
        token, slot, found = chains.token, step.batch.slot[chains.at], list[Tensor]()
        ends = chains.row < len(self._last) - 1
        for number in range(most):
            live, slot = ends & (chains.ahead > number), slot + 1
            row, own = torch.where(live, chains.row, 0), torch.where(live, slot, -1)
            guessed = self._step(row, token, own, state, chains.spare)
            token = ops.argmax_tokens(self._model.guess_logits(guessed))
            state = self._model.next_states(guessed)
            found.append(token)
        return torch.stack(found, dim=1) if found else token.new_empty(len(token), 0)

    def guess(self, step: Step, states: Tensor, ends: Ends, others: int = 0) -> Tensor:
        """Guess what follows the tokens that were chosen.

        Args:
            step: what has run.
            states: from `follow`.
            ends: of its rows.
            others: likeliest first guesses that are told beside.
        Returns:
            [n, largest of `ends.ahead` + others] int64; of the guesses, numbers behind those wanted
            mean nothing.
        """
        most = int(ends.ahead.max(initial=0))
        found = ends.token.new_zeros(len(ends.ahead), most + others)
        self._last[ends.row] = state = states[ends.at]
        row, token, slot = ends.row, ends.token, step.batch.slot[ends.at]
        alive: Ints = np.arange(len(ends.ahead))
        for number in range(most):
            still = np.flatnonzero(ends.ahead[alive] > number)
            alive = alive[still]
            some, place = send((still, alive), token.device)
            row, token, slot, state = row[some], token[some], slot[some] + 1, state[some]
            guessed = self._step(row, token, slot, state, self._nowhere)
            logits = self._model.guess_logits(guessed)
            token = ops.argmax_tokens(logits)
            if number == 0 and others:
                found[place, most:] = logits.topk(others, dim=1).indices
            state = self._model.next_states(guessed)
            found[place, number] = token
        return found

    def _step(
        self, row: Tensor, token: Tensor, slot: Tensor, state: Tensor, spare: Sequence[int]
    ) -> Tensor:
        """Run a token of some rows [n], each in its slot and behind its state: [n, width]. Slots
        below 0 are nobody's and go to the location that is spare in each page group."""
        rows, size = self._rows, self._rows.slots.page_size
        places = []
        for table, nowhere in zip(rows.page_tables, spare, strict=True):
            location = table[row, slot // size].long() * size + slot % size
            places.append(PagePlace(table, torch.where(slot < 0, nowhere, location)))
        none = slot.new_empty(0)
        batch = Batch(
            input_ids=token.clamp(min=0),
            positions=rows.shifted(slot.clamp(min=0), row),
            row=row,
            slot=slot,
            places=tuple(places),
            completed=none,
            completed_pages=none,
            max_slot=rows.capacity - 1,
        )
        layer = self._backends.bind(self._layer, batch, decode_cuts(len(row)))
        return self._model.guess(self._model.embedded(batch), state, batch.positions, layer)

    def resume(self, opened: Sequence[RowOpen], row: Ints, first: Ints) -> None:
        """Set the state of rows that begin: none, or what the page in front of them keeps.

        Args:
            opened: these rows.
            row, first: [n], rows of a step, and their first slots; of one that comes again it is
                the first that counts.
        """
        waiting = {entry.row for entry in opened}
        size = self._rows.slots.page_size
        for number, slot in zip(row.tolist(), first.tolist(), strict=True):
            if number not in waiting:
                continue
            waiting.remove(number)
            if slot == 0:
                self._last[number] = 0
            else:
                page = self._rows.page_of(number, slot // size - 1, self._group)
                self._last[number] = self._kept[page]
