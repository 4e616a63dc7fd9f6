"""Gated delta nets: a convolution and a recurrent state instead of keys and values.

A row's state and the last inputs of its convolution lie in the row's place among the states and are
read and written there. A row that begins is treated as one of zeros, whatever lies in its place:
others have used it.

A state cannot be cut back. So a row with guesses is run from its state and leaves it as it is; when
it is known which guesses were right, the tokens that count are run once more, from their inputs,
which have been kept, and the state advances over them alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cairn import ops
from cairn.attention.base import AttentionBackend, StepPlan
from cairn.attention.batch import Batch, StepRows
from cairn.attention.cuts import Cuts
from cairn.attention.inputs import GatedDeltaInputs
from cairn.cache.schema import LayerSchema, PageFormat, RowField
from cairn.specs.backends import GATED_DELTA
from cairn.specs.gated_delta import GatedDeltaSpec

STATE, CONV = "state", "conv"
GRID = 64
"""Chunks of the delta rule begin at multiples of it in their row, so that a prompt that is cut
there gives the same numbers to the last bit."""
FEW = 16
"""Up to this many tokens of a row run one after the other, which costs no more than a chunk."""
NOBODY = -1
SOFTPLUS = (1.0, 20.0)
"""Steepness of softplus, and the input from which on it is the identity."""


class Piece(NamedTuple):
    """Consecutive tokens of a row.

    Attributes:
        number: which of the row's pieces it is.
        row: the row's number, and its state's.
        begin: index of the first token in the step.
        first: its slot.
        length: how many tokens.
    """

    number: int
    row: int
    begin: int
    first: int
    length: int


class Runs(NamedTuple):
    """Pieces, each of another row, that an op takes at once.

    Attributes:
        token: [n] int64, the tokens' indices in the step; None: all of it in order.
        starts: [R + 1] int32, where pieces begin among these tokens, and the end.
        state: [R] int32, the rows' states.
        begun: [R] bool, whether the row has a state; False: it begins.
    """

    token: Tensor | None
    starts: Tensor
    state: Tensor
    begun: Tensor

    def of(self, x: Tensor) -> Tensor:
        """The piece's tokens of x [T, ...], contiguous: strides may change a CPU's rounding."""
        return x.contiguous() if self.token is None else x[self.token]


class Advance(NamedTuple):
    """Arguments of one call of the delta rule.

    Attributes:
        runs: what it runs.
        few: no piece has more than `FEW` tokens.
    """

    runs: Runs
    few: bool


class Part(NamedTuple):
    """Rows of a step whose states advance with it.

    Attributes:
        token: [n] int64, their tokens' indices in the step; None: all of it in order.
        whole: the rows, among these tokens.
        advances: the rows cut into pieces; of those of one row, each goes on from the one before.
    """

    token: Tensor | None
    whole: Runs
    advances: Sequence[Advance]


class Guessed(NamedTuple):
    """Rows of a step with guesses, whose states stay as they are.

    Attributes:
        token: [n] int64, their tokens' indices in the step.
        rows: the rows, among these tokens.
        row: [R] int64, their numbers.
        apart: the rows, with states of their own numbered from 0.
    """

    token: Tensor
    rows: Runs
    row: Tensor
    apart: Runs

    @classmethod
    def of(cls, rows: Sequence[Piece], device: torch.device) -> Guessed:
        """Of these rows."""
        runs = _runs(rows, device, together=True)
        own = torch.arange(len(rows), dtype=torch.int32, device=device)
        return cls(_indices(rows, device), runs, runs.state.long(), runs._replace(state=own))

    def counted(self, counts: Tensor) -> Runs:
        """The rows' tokens that count, `counts` [R] int64 of each. Each row is two sequences: these
        tokens, and behind them those without a state to change."""
        begin, state = self.rows.starts[:-1], self.rows.state
        ends = torch.stack((begin, begin + counts), dim=1).flatten()
        return Runs(
            None,
            torch.cat((ends, self.rows.starts[-1:])).int(),
            torch.stack((state, torch.full_like(state, NOBODY)), dim=1).flatten(),
            self.rows.begun.repeat_interleave(2),
        )


@dataclass(slots=True, kw_only=True)
class GatedDeltaPlan(StepPlan):
    """What the delta rule derives from a step.

    Attributes:
        settled: rows without guesses; None: there are none.
        guessed: rows with guesses; None: there are none.
        inputs: by layer, those of the rows with guesses.
        counted: of these rows, the tokens that count; None: not known yet.
    """

    settled: Part | None
    guessed: Guessed | None
    inputs: dict[int, GatedDeltaInputs] = field(default_factory=dict)
    counted: Runs | None = None


class GatedDeltaBackend(AttentionBackend):
    """The convolution, the gates and the delta rule of the layers that have a recurrent state."""

    name: ClassVar[str] = GATED_DELTA
    in_graphs: ClassVar[bool] = False

    @classmethod
    def needs(cls, spec: GatedDeltaSpec, form: PageFormat) -> LayerSchema:
        """The state, and the inputs that the convolution looks back at, the oldest first."""
        shape = spec.value_heads, spec.value_dim, spec.key_dim
        state = RowField(STATE, shape, torch.float32)
        inputs = spec.conv_channels, spec.conv_kernel - 1
        return LayerSchema(rows=(state, RowField(CONV, inputs, form.dtype)))

    def plan(self, batch: Batch, cuts: Cuts, rows: StepRows | None) -> GatedDeltaPlan:
        """Cut the rows at multiples of GRID, but for those with guesses."""
        assert rows is not None, "graphs do not hold this backend"
        begin = (rows.count.cumsum() - rows.count).tolist()
        whole = [
            Piece(0, *numbers)
            for numbers in zip(
                rows.row.tolist(), begin, rows.first.tolist(), rows.count.tolist(), strict=True
            )
        ]
        device, settled, guessed = batch.row.device, whole, None
        if rows.drafts is not None:
            settled = [whole[i] for i in np.flatnonzero(rows.drafts == 0)]
            guessed = Guessed.of([whole[i] for i in np.flatnonzero(rows.drafts)], device)
        return GatedDeltaPlan(
            batch=batch,
            cuts=cuts,
            rows=rows,
            settled=_part(settled, device, guessed is None) if settled else None,
            guessed=guessed,
        )

    def run(self, layer: int, inputs: GatedDeltaInputs, plan: GatedDeltaPlan) -> Tensor:
        """Outputs of the delta rule, before the gated norm: [T, hv, dv] in the inputs' dtype.

        `inputs.qkv` is overwritten.
        """
        settled, guessed = plan.settled, plan.guessed
        if guessed is None:
            assert settled is not None
            return self._run(layer, inputs, settled)
        spec, qkv = self.layers[layer], inputs.qkv
        out = qkv.new_empty(len(qkv), spec.value_heads, spec.value_dim)
        if settled is not None and settled.token is not None:
            out[settled.token] = self._run(layer, _at(inputs, settled.token), settled)
        chosen, fields = _at(inputs, guessed.token), self.pools.rows[layer]
        plan.inputs[layer] = replace(chosen, qkv=chosen.qkv.clone())
        self._convolve(chosen, fields[CONV][guessed.row], guessed.apart)
        out[guessed.token] = self._advance(spec, chosen, fields[STATE], guessed.rows, True, False)
        return out

    def settle(self, layer: int, plan: GatedDeltaPlan, counts: Tensor) -> None:
        """Run the tokens that count once more."""
        if plan.guessed is None:
            return
        if plan.counted is None:
            plan.counted = plan.guessed.counted(counts)
        inputs, fields = plan.inputs.pop(layer), self.pools.rows[layer]
        self._convolve(inputs, fields[CONV], plan.counted)
        self._advance(self.layers[layer], inputs, fields[STATE], plan.counted, True)

    def _run(self, layer: int, inputs: GatedDeltaInputs, part: Part) -> Tensor:
        """Outputs [n, hv, dv] of a part's tokens; its states go on."""
        spec, fields, qkv = self.layers[layer], self.pools.rows[layer], inputs.qkv
        self._convolve(inputs, fields[CONV], part.whole)
        out = qkv.new_empty(len(qkv), spec.value_heads, spec.value_dim)
        for runs, few in part.advances:
            o = self._advance(spec, inputs, fields[STATE], runs, few)
            if runs.token is None:
                return o
            out[runs.token] = o
        return out

    def _convolve(self, inputs: GatedDeltaInputs, states: Tensor, runs: Runs) -> None:
        """Overwrite the inputs by their convolution; the states of their rows go on."""
        ops.causal_conv1d_fwd(
            inputs.qkv.t(),
            inputs.conv_weight,
            None,
            states,
            runs.starts,
            runs.state,
            runs.begun,
            True,
            NOBODY,
        )

    def _advance(
        self,
        spec: GatedDeltaSpec,
        inputs: GatedDeltaInputs,
        state: Tensor,
        runs: Runs,
        few: bool,
        update: bool = True,
    ) -> Tensor:
        """Outputs [n, hv, dv] of the runs' tokens; states go on if `update`, which
        only `few` can do without."""
        keys, values = spec.key_heads * spec.key_dim, spec.value_heads * spec.value_dim
        q, k, v = runs.of(inputs.qkv).split((keys, keys, values), dim=-1)
        q, k = (x.unflatten(-1, (spec.key_heads, spec.key_dim))[None] for x in (q, k))
        v = v.unflatten(-1, (spec.value_heads, spec.value_dim))[None]
        a, b = runs.of(inputs.a), runs.of(inputs.b)
        if few:
            o: Tensor = ops.fused_sigmoid_gating_delta_rule_update(
                inputs.a_log,
                a,
                inputs.dt_bias,
                *SOFTPLUS,
                q,
                k,
                v,
                b,
                state,
                runs.state,
                use_qk_l2norm_in_kernel=True,
                cu_seqlens=runs.starts,
                disable_state_update=not update,
                has_initial_state=runs.begun,
            )
            return o[0]
        # beta in float32: this op rounds its result to the dtype of b, the chunked one does not.
        g, beta = ops.fused_gdn_gating(inputs.a_log, a, b.float(), inputs.dt_bias, *SOFTPLUS)
        o, _, _ = ops.chunk_gated_delta_rule(
            q,
            k,
            v,
            g,
            beta,
            None,
            state,
            runs.state,
            runs.starts,
            use_qk_l2norm_in_kernel=True,
            has_initial_state=runs.begun,
        )
        return o[0]


def cut(row: Piece) -> list[Piece]:
    """The parts of a row's tokens: those up to a multiple of GRID, whole chunks, and what is left.
    How a part is run depends on its own length alone, so the last one of a prompt is run alike
    whether or not the prompt was cut before it."""
    end = row.first + row.length
    head = min(end, -(-row.first // GRID) * GRID)
    tail = max(head, end // GRID * GRID)
    parts = [(a, b) for a, b in pairwise((row.first, head, tail, end)) if b > a]
    return [
        Piece(number, row.row, row.begin + a - row.first, a, b - a)
        for number, (a, b) in enumerate(parts)
    ]


def _part(rows: Sequence[Piece], device: torch.device, together: bool) -> Part:
    """Whole rows whose states advance; together: they are all of the step."""
    token = None if together else _indices(rows, device)
    starts = accumulate((row.length for row in rows), initial=0)
    own = [row._replace(begin=begin) for row, begin in zip(rows, starts, strict=False)]
    pieces, advances = [piece for row in own for piece in cut(row)], []
    for kind in sorted({_kind(piece) for piece in pieces}):
        chosen = [piece for piece in pieces if _kind(piece) == kind]
        advances.append(Advance(_runs(chosen, device, len(chosen) == len(pieces)), few=kind[1]))
    return Part(token, _runs(own, device, together=True), advances)


def _at(inputs: GatedDeltaInputs, token: Tensor) -> GatedDeltaInputs:
    """Those of some tokens, by their indices."""
    return replace(inputs, qkv=inputs.qkv[token], a=inputs.a[token], b=inputs.b[token])


def _indices(pieces: Sequence[Piece], device: torch.device) -> Tensor:
    """[n] int64, of the pieces' tokens."""
    found = [piece.begin + i for piece in pieces for i in range(piece.length)]
    return torch.tensor(found, dtype=torch.int64, device=device)


def _kind(piece: Piece) -> tuple[int, bool]:
    """Pieces that are alike in this run together, in this order."""
    return piece.number, piece.length <= FEW


def _runs(pieces: Sequence[Piece], device: torch.device, together: bool) -> Runs:
    """Pieces as tensors; together: they are all there is."""

    def sent(numbers: Sequence[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor(numbers, dtype=dtype, device=device)

    token = None if together else _indices(pieces, device)
    starts = sent([0, *accumulate(piece.length for piece in pieces)], torch.int32)
    state = sent([piece.row for piece in pieces], torch.int32)
    return Runs(token, starts, state, sent([piece.first > 0 for piece in pieces], torch.bool))
