"""From logits to tokens. Each row draws by its own seed and its own count of tokens, so a request
gets the same tokens in a batch, alone, and after a retraction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cairn import ops
from cairn.runner.step import Alternatives, RowOpen, RowWork, Sampled
from cairn.types import SamplingParams

INT64_MASK = (1 << 64) - 1
FLOAT32 = torch.finfo(torch.float32)
PENALTY_RANGE = (1e-30, 1e30)
"""Repetition penalties beyond it choose the same tokens, but logits overflow."""


@dataclass(slots=True)
class _RowState:
    """What sampling remembers of a row."""

    opened: RowOpen
    prompt_mask: Tensor | None = None
    output_counts: Tensor | None = None


class Sampler:
    """Chooses tokens for the rows of a step.

    Args:
        vocab_size: ids below it exist for users; logits hold exactly these.
        device: where the logits live.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._rows: dict[int, _RowState] = {}

    def open(self, opened: RowOpen) -> None:
        """A request takes a row: whatever an earlier one left there is forgotten."""
        state = _RowState(opened)
        if opened.params.penalized:
            history = torch.as_tensor(list(opened.history), dtype=torch.int64, device=self.device)
            prompt, output = history[: opened.num_prompt], history[opened.num_prompt :]
            counts = torch.zeros(self.vocab_size, dtype=torch.int32, device=self.device)
            state.prompt_mask = torch.zeros_like(counts, dtype=torch.bool)
            state.prompt_mask[prompt] = True
            state.output_counts = counts.index_add_(0, output, torch.ones_like(output).int())
        self._rows[opened.row] = state

    def close(self, row: int) -> None:
        """The row's request ended."""
        self._rows.pop(row, None)

    def params(self, row: int) -> SamplingParams:
        """The sampling parameters of the row's request."""
        return self._rows[row].opened.params

    def sample(self, logits: Tensor, works: Sequence[RowWork]) -> tuple[Sampled, ...]:
        """Choose one token for each work.

        Args:
            logits: [n, V] float32, one row for each work; changed in place.
        """
        if not works:
            return ()
        states = [self._rows[work.row] for work in works]
        reported = self._raw_logprobs(logits, states)
        self._adjust(logits, works, states)
        if all(state.opened.params.greedy for state in states):
            tokens = _argmax(logits)
        else:
            tokens = self._draw(logits, works, states)
        chosen = tokens.tolist()
        for state, token in zip(states, chosen, strict=True):
            if state.output_counts is not None:
                state.output_counts[token] += 1
        alternatives = self._report(reported, states, tokens)
        return tuple(
            Sampled(work.row, token, alternatives.get(i))
            for i, (work, token) in enumerate(zip(works, chosen, strict=True))
        )

    def _adjust(
        self, logits: Tensor, works: Sequence[RowWork], states: Sequence[_RowState]
    ) -> None:
        """Bias, penalties, and what stop ids and grammars forbid, in place."""
        where: list[tuple[int, int]] = []
        bias: list[float] = []
        for i, (work, state) in enumerate(zip(works, states, strict=True)):
            params = state.opened.params
            for token, value in params.logit_bias.items():
                where.append((i, token))
                bias.append(value)
            if work.output_index < params.min_tokens:
                for token in state.opened.stop_ids:
                    where.append((i, token))
                    bias.append(-torch.inf)
        if where:
            ops.apply_logit_bias(logits, self._tensor(where), self._tensor(bias))
        rows = [i for i, state in enumerate(states) if state.output_counts is not None]
        if rows:
            self._penalize(logits, rows, states)
        masks = {i: work.mask for i, work in enumerate(works) if work.mask is not None}
        if masks:
            bitmask = torch.from_numpy(np.stack(list(masks.values()))).to(self.device)
            ops.apply_token_bitmask(logits, bitmask, self._tensor(list(masks)))

    def _penalize(self, logits: Tensor, rows: Sequence[int], states: Sequence[_RowState]) -> None:
        chosen = [states[i] for i in rows]
        masks = torch.stack([s.prompt_mask for s in chosen if s.prompt_mask is not None])
        counts = torch.stack([s.output_counts for s in chosen if s.output_counts is not None])
        params = [s.opened.params for s in chosen]
        part = logits[self._tensor(rows)]
        ops.apply_penalties(
            part,
            masks,
            counts,
            self._tensor([p.presence_penalty for p in params]),
            self._tensor([p.frequency_penalty for p in params]),
            self._tensor([_within(p.repetition_penalty, *PENALTY_RANGE) for p in params]),
        )
        logits[self._tensor(rows)] = part

    def _draw(
        self, logits: Tensor, works: Sequence[RowWork], states: Sequence[_RowState]
    ) -> Tensor:
        """Temperature, then top-k, then top-p, then min-p, then one draw a row."""
        params = [state.opened.params for state in states]
        # A greedy row among others keeps its largest logit alone, whatever the draw.
        vocab = self.vocab_size
        top_k = [1 if p.greedy else min(p.top_k, vocab) if p.top_k > 0 else vocab for p in params]
        temperature = self._tensor(
            [1.0 if p.greedy else _within(p.temperature, FLOAT32.tiny, FLOAT32.max) for p in params]
        )
        scaled = logits - logits.amax(dim=-1, keepdim=True)
        probs = torch.softmax(scaled / temperature[:, None], dim=-1)
        if any(k < vocab for k in top_k):
            probs = ops.top_k_renorm_probs(probs, self._tensor(top_k))
        if any(p.top_p < 1.0 for p in params):
            probs = ops.top_p_renorm_probs(probs, self._tensor([p.top_p for p in params]))
        if any(p.min_p > 0.0 for p in params):
            probs = ops.min_p_renorm_probs(probs, self._tensor([p.min_p for p in params]))
        seeds = self._tensor([_signed(state.opened.seed) for state in states])
        uniform = ops.counter_uniform(seeds, self._tensor([w.output_index for w in works]))
        tokens = ops.sampling_from_probs(probs, uniform).long()
        greedy = [i for i, p in enumerate(params) if p.greedy]
        if greedy:
            index = self._tensor(greedy)
            tokens[index] = _argmax(logits[index])
        return tokens

    def _raw_logprobs(self, logits: Tensor, states: Sequence[_RowState]) -> Tensor | None:
        """Log-probabilities before anything is adjusted, of the rows that want them."""
        rows = [i for i, s in enumerate(states) if s.opened.params.logprobs is not None]
        return torch.log_softmax(logits[self._tensor(rows)], dim=-1) if rows else None

    def _report(
        self, logprobs: Tensor | None, states: Sequence[_RowState], tokens: Tensor
    ) -> dict[int, Alternatives]:
        if logprobs is None:
            return {}
        rows = [i for i, s in enumerate(states) if s.opened.params.logprobs is not None]
        found = {}
        for k, i in enumerate(rows):
            wanted = states[i].opened.params.logprobs
            assert wanted is not None
            found[i] = alternatives(logprobs[k], int(tokens[i]), wanted)
        return found

    def _tensor(self, values: Sequence[object]) -> Tensor:
        return torch.as_tensor(values, device=self.device)


def alternatives(logprobs: Tensor, token: int, wanted: int) -> Alternatives:
    """The `wanted` most likely tokens and the chosen one.

    Args:
        logprobs: [V] float32.
        token: the chosen id.
        wanted: how many; -1: all.
    """
    chosen = logprobs[token]
    count = logprobs.numel() if wanted < 0 else min(wanted, logprobs.numel())
    values, ids = torch.topk(logprobs, count)
    top = Alternatives(
        float(chosen), ids.cpu().numpy(), values.cpu().numpy(), np.arange(1, count + 1)
    )
    if token in top.ids:
        return top
    rank = int((logprobs > chosen).sum()) + 1
    return Alternatives(
        float(chosen),
        np.append(top.ids, token),
        np.append(top.values, np.float32(chosen.item())),
        np.append(top.ranks, rank),
    )


def _within(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def _argmax(logits: Tensor) -> Tensor:
    """The most likely token of every row [n], -1 where the logits allow none."""
    best, tokens = logits.max(dim=-1)
    return tokens.masked_fill_(best.isnan() | (best == -torch.inf), -1)


def _signed(seed: int) -> int:
    """Any integer as a signed 64-bit one."""
    seed &= INT64_MASK
    return seed - (1 << 64) if seed >> 63 else seed
