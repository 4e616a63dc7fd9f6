"""Runs a model's draft layer: keeps its cache in step with the model's and drafts tokens.

The draft layer reads pairs: token s, and the model's hidden state of token s - 1. The pair is
stored in slot s of the draft layer's cache, so the content of a page depends only on the tokens up
to the page's end, and the prefix cache shares draft pages like any others. To continue, a row needs
the hidden state of its last token; a row that starts from shared pages takes it from the last of
these pages, which stores the hidden state of its last slot (`DRAFT_STATE`).
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
    """The part of a model that the draft head needs, see `cairn.models.decoder.Decoder`."""

    def draft_states(self, hidden: Tensor) -> Tensor:
        """Hidden states of a step -> the states that the draft layer reads [T, width]."""

    def embedded(self, batch: Batch) -> Tensor:
        """[T, hidden], the tokens of a step."""

    def guess(
        self, embedded: Tensor, states: Tensor, positions: Tensor, layer: BoundLayer
    ) -> Tensor:
        """Tokens [T, hidden] and states [T, width] -> [T, width]."""

    def guess_logits(self, guessed: Tensor) -> Tensor:
        """[n, width] -> [n, V] float32."""

    def next_states(self, guessed: Tensor) -> Tensor:
        """[n, width] -> the states that the draft layer reads for the next draft [n, width]."""


class Ends(NamedTuple):
    """The last accepted token of each row that sampled in a step.

    Attributes:
        row: [n] int64 on the device, row numbers.
        at: [n] int64 on the device, index of the row's last accepted token in the step.
        token: [n] int64 on the device, the token sampled after it.
        ahead: [n] on the host, how many tokens to draft after that.
    """

    row: Tensor
    at: Tensor
    token: Tensor
    ahead: Ints


class Chains(NamedTuple):
    """`Ends` of a step that runs as a graph, where only the device knows which tokens were
    accepted: one entry for every token of the step.

    Attributes:
        row: [n] int64, the row whose last accepted token this is; for all other tokens the padding
            row, which is the last row.
        at: [n] int64, index of the token in the step.
        token: [n] int64, the token sampled after it.
        ahead: [n] int64, how many tokens to draft after that.
        spare: for each page group the location to which padding is written.
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
        # Without graphs there is no padding.
        self._nowhere = [0] * len(rows.page_tables)
        shape = len(rows.last_token), self._kept.shape[1]
        self._last = torch.zeros(shape, dtype=self._kept.dtype, device=rows.device)

    def begin(
        self, opened: Sequence[RowOpen], layout: Layout, step: Step, hidden: Tensor
    ) -> Tensor:
        """`follow` for a step without a graph: the host knows the rows.

        Args:
            opened: rows that start in this step, from no tokens or from shared pages.
            layout, step: the step that has run.
            hidden: [T, ...], the model's hidden states of the step.
        Returns:
            [T, width], the hidden states as the draft layer reads them.
        """
        number, requests = layout.rows.row, self._rows.num_requests
        self.resume(opened, number, layout.rows.first)
        branches = number[number >= requests]
        if len(branches):
            # A branch of a tree of drafts continues from its row's state.
            to, own = send((branches, branches % requests), hidden.device)
            self._last[to] = self._last[own]
        states = self.follow(step, hidden)
        row, last = send((number, layout.last), states.device)
        self._last[row] = states[last]
        return states

    def follow(self, step: Step, hidden: Tensor) -> Tensor:
        """Run the draft layer over a step's tokens, which fills its cache; returns the hidden
        states as it reads them [T, width]."""
        batch, states = step.batch, self._model.draft_states(hidden)
        row = batch.row
        begins = torch.cat((torch.ones_like(row[:1], dtype=torch.bool), row[1:] != row[:-1]))
        before = torch.where(begins[:, None], self._last[row], states.roll(1, 0))
        embedded, layer = self._model.embedded(batch), step.layers[self._layer]
        self._model.guess(embedded, before, batch.positions, layer)
        # Padding of a graph is written to the last page.
        self._kept[batch.completed_pages] = states[batch.completed]
        return states

    def chain(self, step: Step, states: Tensor, chains: Chains, most: int) -> Tensor:
        """Draft tokens inside a graph: shapes do not depend on how many drafts were accepted.

        Args:
            step: the step that has run.
            states: from `follow`.
            chains: one entry for each of its tokens.
            most: drafts after each entry.
        Returns:
            [n, most] int64. Columns from `ahead` on, and entries of the padding row, are undefined.
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
        """Draft tokens after those that were sampled.

        Args:
            step: the step that has run.
            states: from `follow`.
            ends: of its rows.
            others: how many of the most likely first drafts to return besides the chain.
        Returns:
            [n, max(ends.ahead) + others] int64. Columns from `ahead` on, except the last `others`,
            are undefined.
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
        """Run the draft layer over one token of each of some rows [n], after the state [n, width]:
        [n, width]. Slots below 0 are padding and are written to `spare`."""
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
        """Set the state of rows that start: zero, or the one stored in the last shared page.

        Args:
            opened: rows that start in this step.
            row, first: [n], rows of the step and their first slots. A row may occur several times;
                its first occurrence is used.
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
