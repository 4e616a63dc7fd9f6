"""The gated delta rule (Yang, Kautz and Hatamizadeh 2024), token by token and in chunks.

The state S of a head is [V, K] float32 and zero at the start. A token with query q, key k, value v,
log decay g <= 0 and write strength beta computes

    S = e^g S,  u = beta (v - S k),  S = S + u k^T,  o = S q

In chunks of n tokens, with G the running sum of g inside the chunk:

    D[i, j] = e^(G_i - G_j) for i >= j, else 0
    A = the part of beta_i (k_i . k_j) D[i, j] below the diagonal,  T = (I + A)^-1
    U = T (beta v),  P = T (beta e^G k),  N = U - P S^T
    o = (e^G q) S^T + ((q k^T) * D) N,  S = e^(G_n) S + N^T (e^(G_n - G) k)

Sums of g reach -1500 in a chunk: their differences are taken before the exponential, in float64,
because float32 gives such differences to 1e-4 only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 64
FEW = 16
"""Up to this many tokens run token by token, which is no slower than a chunk."""


@dataclass(frozen=True)
class Tokens:
    """Inputs of the delta rule, all float32.

    Attributes:
        q, k: [T, HV, K], a query and a key for each value head; q is scaled.
        v: [T, HV, V].
        g: [T, HV, 1], the log decay, or [T, HV, K]: one for each column of the state.
        beta: [T, HV].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


def prepared(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None, normalised: bool
) -> Tokens:
    """Tokens of q, k [B, T, H, K], v [B, T, HV, V], g [B * T, HV, 1 or K] and beta [B * T, HV].

    Value head j uses key head j // (HV / H). `normalised`: q and k are divided by their l2 norms,
    sqrt(sum of squares + 1e-6). scale: q is multiplied by it; None: K^-1/2.
    """
    each = v.shape[2] // q.shape[2]
    q, k, v = (x.flatten(0, 1).float() for x in (q, k, v))
    if normalised:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    q, k = (x.repeat_interleave(each, dim=1) for x in (q, k))
    return Tokens(q, k, v, g.float(), beta.float())


def step(state: Tensor, tokens: Tokens, row: Tensor | slice) -> Tensor:
    """One token of each of n sequences: outputs [n, HV, V]; state [n, HV, V, K] is changed."""
    k, beta = tokens.k[row].unsqueeze(-2), tokens.beta[row].unsqueeze(-1)
    state *= tokens.g[row].exp().unsqueeze(-2)
    u = beta * (tokens.v[row] - (state * k).sum(-1))
    state += u.unsqueeze(-1) * k
    return (state * tokens.q[row].unsqueeze(-2)).sum(-1)


def by_token(tokens: Tokens, state: Tensor, spans: Sequence[range], out: Tensor) -> None:
    """Run every sequence n, the tokens spans[n], from state[n].

    Args:
        tokens: inputs of all sequences.
        state: [N, HV, V, K], changed.
        spans: [N], token ranges.
        out: [T, HV, V] float32, written where a sequence has tokens.
    """
    order, lengths = _longest_first(spans)
    if not order:
        return
    own, first = state[order], _positions([spans[n].start for n in order], state)
    running = len(order)
    for position in range(lengths[0]):
        while lengths[running - 1] <= position:
            running -= 1
        row = first[:running] + position
        out[row] = step(own[:running], tokens, row)
    state[order] = own


def by_chunk(tokens: Tokens, state: Tensor, spans: Sequence[range], out: Tensor) -> None:
    """`by_token` in chunks, the first of which starts with the sequence; g is [T, HV, 1]."""
    order, lengths = _longest_first(spans)
    if not order:
        return
    # Chunk c of sequence i has the global index first[i] + c.
    counts = [-(-length // CHUNK) for length in lengths]
    first = [sum(counts[:i]) for i in range(len(counts))]
    places = [
        (spans[n].start + c * CHUNK, min(CHUNK, length - c * CHUNK))
        for n, length, count in zip(order, lengths, counts, strict=True)
        for c in range(count)
    ]
    start, size = (_positions(column, state) for column in zip(*places, strict=True))
    inner = torch.arange(CHUNK, device=state.device)
    inside = inner < size[:, None]
    row = torch.where(inside, start[:, None] + inner, 0)
    chunks = Chunks.of(tokens, row, inside)
    own, o = state[order], torch.empty_like(chunks.u)
    begin, running = _positions(first, state), len(order)
    for number in range(counts[0]):
        while counts[running - 1] <= number:
            running -= 1
        current = begin[:running] + number
        o[current] = chunks.advance(own[:running], current)
    out[row[inside]] = o.transpose(1, 2)[inside]
    state[order] = own


@dataclass(frozen=True)
class Chunks:
    """Terms of C chunks of n tokens that do not depend on the state; in padding all inputs are 0.

    Attributes:
        u: [C, HV, n, V], T (beta v).
        p: [C, HV, n, K], T (beta e^G k).
        q: [C, HV, n, K], e^G q.
        k: [C, HV, n, K], e^(G_n - G) k.
        weight: [C, HV, n, n], (q k^T) * D.
        decay: [C, HV, 1, 1], e^(G_n).
    """

    u: Tensor
    p: Tensor
    q: Tensor
    k: Tensor
    weight: Tensor
    decay: Tensor

    @classmethod
    def of(cls, tokens: Tokens, row: Tensor, inside: Tensor) -> Chunks:
        """Chunks of the tokens with indices row [C, n]; `inside` [C, n] is false in padding."""

        def taken(x: Tensor) -> Tensor:
            return torch.where(inside[..., None, None], x[row], 0).transpose(1, 2)

        q, k, v = taken(tokens.q), taken(tokens.k), taken(tokens.v)
        beta = taken(tokens.beta.unsqueeze(-1))
        total = taken(tokens.g).double().cumsum(dim=2)
        ones = torch.ones(row.shape[1], row.shape[1], dtype=torch.bool, device=row.device)
        apart = (total - total.transpose(-1, -2)).masked_fill(~ones.tril(), -torch.inf)
        d, grown = apart.float().exp(), total.float().exp()
        a = (beta * (k @ k.transpose(-1, -2)) * d).tril(-1)
        right = torch.cat((beta * v, beta * grown * k), dim=-1)
        # The diagonal of ones is implied.
        solved = torch.linalg.solve_triangular(a, right, upper=False, unitriangular=True)
        u, p = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
        end = total[:, :, -1:]
        left = (end - total).float().exp()
        return cls(
            u, p, grown * q, left * k, (q @ k.transpose(-1, -2)) * d, end.float().exp()
        )  # fmt: skip

    def advance(self, state: Tensor, chunk: Tensor) -> Tensor:
        """Outputs [m, HV, n, V] of chunk [m], one of each sequence; state [m, HV, V, K] changes."""
        columns = state.transpose(-1, -2)
        new = self.u[chunk] - self.p[chunk] @ columns
        o = self.q[chunk] @ columns + self.weight[chunk] @ new
        state.mul_(self.decay[chunk]).add_(new.transpose(-1, -2) @ self.k[chunk])
        return o


def _longest_first(spans: Sequence[range]) -> tuple[list[int], list[int]]:
    """The sequences that have tokens, the longest first, and their lengths."""
    order = sorted((n for n, span in enumerate(spans) if span), key=lambda n: -len(spans[n]))
    return order, [len(spans[n]) for n in order]


def _positions(numbers: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=like.device)
