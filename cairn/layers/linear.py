"""Linear maps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from cairn import ops
from cairn.distributed.groups import ALONE, Group
from cairn.layers.embedding import ROWS_MULTIPLE, Table
from cairn.layers.norm import RMSNorm
from cairn.layers.schemes.base import PlainScheme, Rows, Scheme
from cairn.layers.weight import Source, Weight
from cairn.specs.ffn import Activation

PLAIN = PlainScheme()


class Linear(nn.Module):
    """y = x W^T + b, for inference. Maps of the same x are stacked into one matrix.

    Args:
        in_features: width of x.
        parts: the checkpoint's matrices, stacked along the rows of W.
        bias: whether there is a b [out].
        dtype: of activations and bias.
        scheme: storage of the weight matrix.
        group: tensor-parallel ranks, which divide x and the columns of W; y is the sum over the
            ranks.
    """

    weight: nn.Parameter
    scale: nn.Parameter
    words: nn.Parameter
    zero: nn.Parameter
    order: nn.Parameter
    """Of schemes that have them."""

    def __init__(
        self,
        in_features: int,
        parts: Sequence[Rows],
        bias: bool = False,
        *,
        dtype: torch.dtype,
        scheme: Scheme = PLAIN,
        group: Group = ALONE,
    ) -> None:
        super().__init__()
        self.parts, self.group = tuple(parts), group
        self.in_features, self.out_features = in_features, sum(part.size for part in parts)
        self.scheme = scheme.of(self.parts, experts=False)
        self.scheme.create(self, dtype)
        self.has_bias = bias
        self.bias: nn.Parameter | None = None
        # Only one rank adds the bias.
        if bias and group.rank == 0:
            b = torch.empty(self.out_features, dtype=dtype)
            self.bias = nn.Parameter(b, requires_grad=False)

    def weights(self, source: Source) -> list[Weight]:
        """Declarations of the checkpoint's tensors."""
        found, start = self.scheme.weights(self, source), 0
        pieces = {source.name(f"{part.name}."): part.pieces for part in self.parts if part.pieces}
        for name, sizes in pieces.items():
            found = [replace(w, pieces=sizes) if w.source.startswith(name) else w for w in found]
        for name, size, *_ in self.parts if self.has_bias else ():
            at = slice(start, start + size)
            bias = Weight(source.name(f"{name}.bias"), (size,), self.bias, at, draw="around_zero")
            found.append(bias)
            start += size
        return found

    def forward(self, x: Tensor, norm: RMSNorm | None = None) -> Tensor:
        """x [..., in], normed first if there is a norm, -> [..., out], in x's dtype."""
        return self.group.sum(self.scheme.product(self, x, norm))

    def add_to(self, residual: Tensor, x: Tensor, norm: RMSNorm | None = None) -> Tensor | None:
        """residual [T, out] += what `forward` gives for x [T, in], in place.

        Args:
            norm: the norm of the next reader of the residual.
        Returns:
            [T, out], the residual after the norm; None: the next product fuses the norm.
        """
        if self.group.alone:
            return self.scheme.add_to(self, residual, x, norm)
        if not self.group.add_product(residual, x, self._product):
            residual += self(x)
        return None

    def add_normed_to(self, residual: Tensor, x: Tensor, norm: RMSNorm) -> None:
        """residual [T, out] += the norm of what `forward` gives for x [T, in], in place."""
        given = norm.weight, norm.eps
        if self.group.alone or not self.group.add_product(residual, x, self._product, given):
            norm.add_to(residual, self(x))

    def _product(self, x: Tensor) -> Tensor:
        """This rank's addend of y."""
        return self.scheme.product(self, x, None)


class Experts(NamedTuple):
    """Experts of a mixture.

    Attributes:
        total: number of experts that tokens choose from.
        held: those of this rank, in the order of its places; None: all.
        shared: number of experts after them that every token runs.
    """

    total: int
    held: tuple[int, ...] | None = None
    shared: int = 0


class ExpertLinear(nn.Module):
    """A linear map with one matrix for each expert.

    Args:
        experts: which.
        in_features: width of x.
        parts: the matrices of one expert, stacked along the rows.
        fused: name of a tensor that holds the matrices of all experts.
        dtype: of activations.
        scheme: storage of the weight matrices.

    Attributes:
        routed: number of this rank's matrices of experts that tokens choose from.
        experts: number of this rank's matrices, E; the last ones are of shared experts.
    """

    weight: nn.Parameter
    scale: nn.Parameter
    words: nn.Parameter
    zero: nn.Parameter
    order: nn.Parameter

    def __init__(
        self,
        experts: Experts,
        in_features: int,
        parts: Sequence[Rows],
        fused: str,
        *,
        dtype: torch.dtype,
        scheme: Scheme = PLAIN,
    ) -> None:
        super().__init__()
        self._of, self.in_features, self.parts = experts, in_features, tuple(parts)
        self.routed = experts.total if experts.held is None else len(experts.held)
        self.experts = self.routed + experts.shared
        self.out_features = sum(part.size for part in parts)
        self.fused, self.scheme = fused, scheme.of(self.parts, experts=True)
        self.scheme.create(self, dtype)

    def weights(self, source: Source) -> list[Weight]:
        """Declarations for the matrices of experts that tokens choose from: one tensor for all of
        them if the checkpoint has that, else one for each matrix; those of other ranks' experts are
        ignored."""
        total, held, _ = self._of
        if source.holds(self.fused):
            sizes, fused = (
                tuple(part.size for part in self.parts),
                self.scheme.fused_weights(self, source),
            )
            at = slice(0, self.routed)
            return [replace(w, pieces=sizes, held=held, at=at) for w in fused]
        places = range(total) if held is None else held
        place_of = {expert: place for place, expert in enumerate(places)}
        found: list[Weight] = []
        for expert in range(total):
            place = place_of.get(expert)
            some = self.scheme.weights(self, source.within(str(expert)), place or 0)
            found += some if place is not None else [replace(w, parameter=None) for w in some]
        return found

    def shared_weights(self, source: Source, axis: int) -> list[Weight]:
        """Declarations for the matrices of shared experts, which a checkpoint stores as one wider
        expert.

        Args:
            axis: of a stored matrix along which the experts' matrices are concatenated.
        """
        found = self.scheme.weights(self, source, self.routed)
        count = self._of.shared
        # Ranks that hold whole experts have some of those that the stored one is divided into.
        if count == 1 and self._of.held is None:
            return found
        return [_divided(weight, count, axis) for weight in found]


def _divided(weight: Weight, count: int, axis: int) -> Weight:
    """Declarations for the matrices of `count` experts from one stored tensor, cut along an axis.

    Args:
        weight: the declaration for the first one's from a separate tensor.
    """
    assert isinstance(weight.at, tuple) and isinstance(weight.at[0], int)
    first, each = weight.at[0], weight.transform
    shape = list(weight.shape)
    shape[axis] *= count

    def cut(stored: Tensor) -> Tensor:
        parts = stored.unflatten(axis, (count, -1)).movedim(axis, 0)
        return parts if each is None else torch.stack([each(part) for part in parts])

    at = (slice(first, first + count), *weight.at[1:])
    # Ranks divide each expert, so a rank's part of the stored tensor is not contiguous.
    return replace(weight, shape=tuple(shape), at=at, transform=cut, whole=True)


class GatedLinear(Linear):
    """y = activation(A x) * B x, where the rows of the map are those of A, then those of B.

    Args:
        in_features, out_features: widths.
        names: of the matrices A and B in a checkpoint.
        activation: silu, or gelu's approximation by tanh.
        limit: A x is clamped to at most limit, B x to [-limit, limit]; 0: no limit.
        dtype: of activations.
        scheme: how the matrix is kept.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        names: tuple[str, str] = ("gate_proj", "up_proj"),
        *,
        activation: Activation = "silu",
        limit: float = 0.0,
        dtype: torch.dtype,
        scheme: Scheme = PLAIN,
    ) -> None:
        parts = [Rows(name, out_features) for name in names]
        super().__init__(in_features, parts, dtype=dtype, scheme=scheme)
        self.activation, self.limit = activation, limit

    def forward(self, x: Tensor, norm: RMSNorm | None = None) -> Tensor:
        """x [T, in], normed first if there is a norm, -> [T, out], in x's dtype."""
        if self.activation == "gelu_tanh":
            gated: Tensor = ops.gelu_tanh_and_mul(super().forward(x, norm))
            return gated
        if self.limit:
            gated = ops.silu_and_mul_clamp(super().forward(x, norm), self.limit)
            return gated
        return self.scheme.gated(self, x, norm)


class Head(Table):
    """The output head, a table of the V tokens of users: logits = x W[:V]^T.

    Args:
        rows: V.
        hidden, dtype: of the table.
        group: ranks that divide the rows.
    """

    def __init__(self, rows: int, hidden: int, *, dtype: torch.dtype, group: Group = ALONE) -> None:
        self.part = rows_of_rank(rows, group)
        super().__init__(len(self.part), hidden, dtype=dtype)
        self.group, self.vocab_size = group, rows

    def logits(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """x [n, hidden] before the final norm -> float32 logits [n, V], a view of longer rows."""
        return _logits(x, self.weight, norm, self.vocab_size, self.group)


class TiedHead(nn.Module):
    """The embedding matrix as output head.

    Args:
        embedding: the module whose `weight` [rows, hidden] is shared.
        vocab_size: V; rows from V on belong to no token of the vocabulary and get no logit.
        group: ranks that divide the rows.
    """

    def __init__(self, embedding: Table, vocab_size: int, group: Group = ALONE) -> None:
        super().__init__()
        self.group = group
        # In a tuple: a plain attribute would register the embedding's parameter a second time.
        self._embedding = (embedding,)
        self.vocab_size = vocab_size

    def logits(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """As `Head.logits`."""
        weight: Tensor = self._embedding[0].weight
        if not self.group.alone:
            part = rows_of_rank(self.vocab_size, self.group)
            weight = weight[part.start : part.stop]
        return _logits(x, weight, norm, self.vocab_size, self.group)


def most_rows(rows: int, group: Group) -> int:
    """Largest number of rows of a head on one rank."""
    return -(-rows // (ROWS_MULTIPLE * group.size)) * ROWS_MULTIPLE


def rows_of_rank(rows: int, group: Group) -> range:
    """The rows of a head on this rank; the last ranks may have fewer, or none."""
    most = most_rows(rows, group)
    begin = min(rows, most * group.rank)
    return range(begin, min(rows, begin + most))


def _logits(x: Tensor, weight: Tensor, norm: RMSNorm, vocab_size: int, group: Group) -> Tensor:
    """Float32 logits [n, V]; each rank computes those of its rows."""
    own = x.new_empty(len(x), 0, dtype=torch.float32)
    if len(weight):
        own = ops.linear(x, weight, None, norm.weight, norm.eps, torch.float32)
    if not group.alone:
        padded = functional.pad(own, (0, most_rows(vocab_size, group) - own.shape[1]))
        own = group.gathered(padded).transpose(0, 1).flatten(1)
    return own[:, :vocab_size]
