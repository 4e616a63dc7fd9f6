"""Gated delta nets: a convolution and a recurrent state instead of keys and values.

Every row has a slot that holds its state and the last inputs of its convolution; kernels read and
write it in place. A row that starts is run with zeros as its state, since its slot has the state of
an earlier row.

A state cannot be rolled back. So a row with draft tokens (guesses) is run without storing the final
state, and the layer's inputs are saved. After verification the accepted tokens are run again from
these inputs, and that final state is stored (`settle`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from cairn import ops
from cairn.attention.base import AttentionBackend, StepPlan
from cairn.attention.batch import Batch, Ints, StepRows
from cairn.attention.cuts import Cuts, decode_cuts
from cairn.attention.inputs import GatedDeltaInputs
from cairn.cache.schema import LayerSchema, PageFormat, RowField
from cairn.specs.backends import GATED_DELTA
from cairn.specs.gated_delta import GatedDeltaSpec

STATE, CONV = "state", "conv"
NOBODY = -1


class Runs(NamedTuple):
    """Rows of a step, one after the other.

    Attributes:
        starts: [R + 1] int32, index of each row's first token, and the end of the last row.
        state: [R] int32, slots of the states that the rows start from.
        stored: [R] int32, slots to which the final states go; negative: they are not stored.
        has_initial_state: [R] bool; False: the row starts from zeros.
        first: [R] int32, the first tokens' slots in their sequences.
        longest: tokens of the longest row, or an upper bound.
    """

    starts: Tensor
    state: Tensor
    stored: Tensor
    has_initial_state: Tensor
    first: Tensor
    longest: int

    @classmethod
    def of_rows(cls, rows: StepRows, device: torch.device) -> Self:
        """From rows known on the host; those with guesses store no state."""
        stored = rows.row if rows.drafts is None else np.where(rows.drafts, NOBODY, rows.row)
        starts = np.concatenate(([0], rows.count.cumsum()))
        numbers = np.concatenate((starts, rows.row, stored, rows.first)).astype(np.int32)
        sent = torch.from_numpy(numbers)
        if device.type != "cpu":
            sent = sent.pin_memory().to(device, non_blocking=True)
        count = len(rows.row)
        begin, row, kept, first = sent.split((count + 1, count, count, count))
        return cls(begin, row, kept, first > 0, first, int(rows.count.max(initial=0)))

    @classmethod
    def of_tokens(cls, batch: Batch) -> Self:
        """Every token is a row; padding has no state."""
        row = torch.where(batch.slot >= 0, batch.row, NOBODY).int()
        starts = torch.arange(len(row) + 1, dtype=torch.int32, device=row.device)
        first = batch.slot.int()
        return cls(starts, row, row, first > 0, first, 1)

    @classmethod
    def of_batch(cls, batch: Batch, most: int) -> Self:
        """From at most `most` rows known only on the device."""
        starts, row, first = ops.ragged_rows(batch.row, batch.slot, most)
        return cls(starts, row, row, first > 0, first, len(batch.row))


class Guessed(NamedTuple):
    """Rows of a step with guesses, whose states `run` does not change.

    Attributes:
        token: [n] int64, indices of their tokens in the step; None: all tokens of the step.
        runs: the rows among these tokens.
    """

    token: Tensor | None
    runs: Runs

    @classmethod
    def of(cls, rows: StepRows, drafts: Ints, device: torch.device) -> Self:
        """The rows of a step that have drafts."""
        begin, chosen = rows.count.cumsum() - rows.count, np.flatnonzero(drafts)
        token = [np.arange(begin[i], begin[i] + rows.count[i]) for i in chosen]
        index = np.concatenate([np.zeros(0, dtype=np.int64), *token])
        own = StepRows(
            rows.row[chosen], rows.first[chosen], rows.count[chosen], rows.slot[index], 0
        )
        return cls(torch.from_numpy(index).to(device), Runs.of_rows(own, device))

    def counted(self, counts: Tensor) -> Runs:
        """The accepted tokens, by the `counts` of `AttentionBackend.settle`. Every row becomes two
        sequences: the accepted tokens, and the rejected ones, which have no state."""
        runs = self.runs
        own = torch.where(runs.state < 0, 0, counts[runs.state.long()])
        ends = torch.stack((runs.starts[:-1], runs.starts[:-1] + own), dim=1).flatten()
        row = torch.stack((runs.state, torch.full_like(runs.state, NOBODY)), dim=1).flatten()
        first = runs.first.repeat_interleave(2)
        starts = torch.cat((ends, runs.starts[-1:])).int()
        return Runs(
            starts, row, row, runs.has_initial_state.repeat_interleave(2), first, runs.longest
        )


@dataclass(slots=True, kw_only=True)
class GatedDeltaPlan(StepPlan):
    """A step's rows as the delta rule runs them.

    Attributes:
        runs: all rows.
        guessed: rows with guesses; None: there are none.
        inputs: layer -> inputs of the rows with guesses.
        counted: accepted tokens of these rows; None: not known yet.
    """

    runs: Runs
    guessed: Guessed | None
    inputs: dict[int, GatedDeltaInputs] = field(default_factory=dict)
    counted: Runs | None = None


class GatedDeltaBackend(AttentionBackend):
    """The convolution, the gates and the delta rule of the layers that have a recurrent state."""

    name: ClassVar[str] = GATED_DELTA

    @classmethod
    def needs(cls, spec: GatedDeltaSpec, form: PageFormat) -> LayerSchema:
        """The state, and the last inputs of the convolution, oldest first."""
        shape = spec.value_heads, spec.value_dim, spec.key_dim
        state = RowField(STATE, shape, torch.float32)
        inputs = spec.conv_channels, spec.conv_kernel - 1
        return LayerSchema(rows=(state, RowField(CONV, inputs, form.dtype, spec.conv_parts)))

    def plan(self, batch: Batch, cuts: Cuts, rows: StepRows | None) -> GatedDeltaPlan:
        """Find the rows and where they start."""
        guessed = None
        if rows is not None:
            runs = Runs.of_rows(rows, batch.row.device)
            if rows.drafts is not None:
                guessed = Guessed.of(rows, rows.drafts, batch.row.device)
        elif batch.guesses:
            most = min(len(batch.slot), self.pools.sizes.rows)
            found = Runs.of_batch(batch, most)._replace(longest=batch.guesses + 1)
            runs = found._replace(stored=torch.full_like(found.stored, NOBODY))
            guessed = Guessed(None, found)
        elif cuts == decode_cuts(len(batch.slot)):
            runs = Runs.of_tokens(batch)
        else:
            runs = Runs.of_batch(batch, min(len(batch.slot), self.pools.sizes.rows))
        return GatedDeltaPlan(batch=batch, cuts=cuts, rows=rows, runs=runs, guessed=guessed)

    def run(self, layer: int, inputs: GatedDeltaInputs, plan: GatedDeltaPlan) -> Tensor:
        """Outputs of the delta rule, before the gated norm: [T, hv, dv] in the inputs' dtype."""
        if plan.guessed is not None:
            token = plan.guessed.token
            plan.inputs[layer] = inputs if token is None else _at(inputs, token)
        return self._advance(layer, inputs, plan.runs)

    def settle(self, layer: int, plan: GatedDeltaPlan, counts: Tensor) -> None:
        """Run the accepted tokens again and store the states."""
        # `Runner.rehearse` runs only some layers.
        if plan.guessed is None or layer not in plan.inputs:
            return
        if plan.counted is None:
            plan.counted = plan.guessed.counted(counts)
        self._advance(layer, plan.inputs.pop(layer), plan.counted)

    def _advance(self, layer: int, inputs: GatedDeltaInputs, runs: Runs) -> Tensor:
        """Outputs [T, hv, dv] of the rows' tokens; final states are stored."""
        spec, fields = self.layers[layer], self.pools.rows[layer]
        where = runs.starts, runs.state, runs.stored, runs.has_initial_state
        mixed = ops.causal_conv1d_rows(
            inputs.qkv, inputs.conv_weight, fields[CONV], *where, runs.longest
        )
        keys, values = spec.key_heads * spec.key_dim, spec.value_heads * spec.value_dim
        q, k, v = mixed.split((keys, keys, values), dim=-1)
        q, k = (x.unflatten(-1, (spec.key_heads, spec.key_dim)) for x in (q, k))
        v = v.unflatten(-1, (spec.value_heads, spec.value_dim))
        gates = inputs.a_log, inputs.a, inputs.dt_bias
        o: Tensor = ops.gated_delta_rule_rows(
            *gates, q, k, v, inputs.b, fields[STATE], *where, runs.first, runs.longest
        )
        return o


def _at(inputs: GatedDeltaInputs, token: Tensor) -> GatedDeltaInputs:
    """Inputs of the tokens with these indices."""
    return replace(inputs, qkv=inputs.qkv[token], a=inputs.a[token], b=inputs.b[token])
