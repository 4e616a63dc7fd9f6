"""The interface of schemes of linear layers."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from cairn import ops
from cairn.layers.norm import RMSNorm
from cairn.layers.weight import Index, Source, Weight
from cairn.ops import planning

if TYPE_CHECKING:
    from cairn.layers.linear import ExpertLinear, Linear


class Rows(NamedTuple):
    """Rows of a linear map that one stored matrix fills.

    Attributes:
        name: of the matrix, without ".weight".
        size: how many.
        order: [size] int64 on the CPU, the stored row that each takes; None: in their order.
        pieces: see `Weight`.
    """

    name: str
    size: int
    order: Tensor | None = None
    pieces: tuple[int, ...] = ()


class Chosen(NamedTuple):
    """The experts that tokens run.

    Attributes:
        weights, ids: [T, k] float32 and int32; -1: an expert of another rank.
        limit: see `cairn.specs.ffn.DenseFfn`.
    """

    weights: Tensor
    ids: Tensor
    limit: float = 0.0

    def among_chosen(self) -> tuple[Tensor, Chosen]:
        """The experts that some token runs, ascending, and the same choice with their indices in
        these."""
        ids = self.ids.long()
        hit = ids[ids >= 0].unique()
        index = torch.searchsorted(hit, ids)
        return hit, self._replace(ids=torch.where(ids < 0, -1, index))


class Scheme(ABC):
    """One way to keep a matrix [out, in]."""

    @property
    @abstractmethod
    def unpacked(self) -> Scheme:
        """A scheme for the same checkpoint that keeps its matrices in the model's dtype."""

    def within(self, name: str) -> Scheme:
        """The scheme of a submodule: some may not be quantised."""
        return self

    def of(self, parts: Sequence[Rows], experts: bool) -> Scheme:
        """The scheme of a linear map of these parts, or of a map of experts."""
        return self

    def fused_weights(self, linear: ExpertLinear, source: Source) -> list[Weight]:
        """What fills a map of experts from one tensor for all of them."""
        shape = linear.routed, linear.out_features, linear.in_features
        return [Weight(source.name(linear.fused), shape, linear.weight)]

    def joins(self, other: Scheme, width: int) -> bool:
        """Whether a map of experts may hold matrices of this scheme and of another one: both are
        stored and kept in the same way.

        Args:
            width: of the other's experts, where one stored matrix holds several of them, side by
                side or one below the other; 0: each has its own.
        """
        return False

    def divide(  # noqa: B027 - most can be divided anywhere
        self, own: Linear | ExpertLinear, whole: Linear | ExpertLinear
    ) -> None:
        """Make the parameters of a map, which are not filled yet, such that they can be divided.

        Raises:
            BadConfig: they cannot be divided so.

        Args:
            own: a rank's part.
            whole: the map that is divided.
        """

    @abstractmethod
    def create(self, linear: Linear | ExpertLinear, dtype: torch.dtype) -> None:
        """Register the parameters of a map on it; `dtype` is that of activations. Those of experts
        have the expert as their first axis."""

    @abstractmethod
    def weights(
        self, linear: Linear | ExpertLinear, source: Source, expert: int | None = None
    ) -> list[Weight]:
        """What fills these parameters, or one expert's part of them."""

    @abstractmethod
    def experts(
        self, gate_up: ExpertLinear, down: ExpertLinear, x: Tensor, chosen: Chosen
    ) -> Tensor:
        """Sum over the chosen experts of weight * down(silu(gate x) * up x).

        Args:
            gate_up, down: maps of this scheme.
            x: [T, in].
            chosen: which, and their weights.
        Returns:
            [T, in] of x's dtype.
        """

    @abstractmethod
    def product(self, linear: Linear, x: Tensor, norm: RMSNorm | None) -> Tensor:
        """x [..., in], normed first if there is a norm, -> [..., out] in x's dtype."""

    def gated(self, linear: Linear, x: Tensor, norm: RMSNorm | None) -> Tensor:
        """silu(A x) * B x of a map whose rows are A, then B: x [T, in] -> [T, out / 2]."""
        gated: Tensor = ops.silu_and_mul(self.product(linear, x, norm))
        return gated

    def add_to(
        self, linear: Linear, residual: Tensor, x: Tensor, norm: RMSNorm | None
    ) -> Tensor | None:
        """residual [T, out] += the product with x [T, in], in place.

        Args:
            norm: what the residual goes through next.
        Returns:
            The residual after the norm; None: it was left to the next product.
        """
        product = self.product(linear, x, None)
        if norm is not None:
            return norm.of_sum(residual, product)
        residual += product
        return None


def normed(x: Tensor, norm: RMSNorm | None) -> Tensor:
    """x after the norm, if there is one."""
    return x if norm is None else norm(x)


def biased(y: Tensor, bias: nn.Parameter | None) -> Tensor:
    """y plus the bias, if there is one."""
    return y if bias is None else y + bias


class PlainScheme(Scheme):
    """A matrix in the model's dtype."""

    @property
    def unpacked(self) -> Scheme:
        """Itself."""
        return self

    def joins(self, other: Scheme, width: int) -> bool:
        """See the base. Subclasses read other formats."""
        return type(self) is type(other) is PlainScheme

    def create(self, linear: Linear | ExpertLinear, dtype: torch.dtype) -> None:
        """One parameter `weight` [out, in], or [E, out, in]."""
        shape = *leading(linear), linear.out_features, linear.in_features
        weight = torch.empty(shape, dtype=dtype)
        linear.weight = nn.Parameter(weight, requires_grad=False)

    def weights(
        self, linear: Linear | ExpertLinear, source: Source, expert: int | None = None
    ) -> list[Weight]:
        """A matrix for each part."""
        found, start = [], 0
        for name, size, order, *_ in linear.parts:
            found.append(
                Weight(
                    source.name(f"{name}.weight"),
                    (size, linear.in_features),
                    linear.weight,
                    at_rows(expert, start, size),
                    transform=None if order is None else functools.partial(reordered, order=order),
                )
            )
            start += size
        return found

    def experts(
        self, gate_up: ExpertLinear, down: ExpertLinear, x: Tensor, chosen: Chosen
    ) -> Tensor:
        """Matrices as they are."""
        return ops.fused_experts(
            x,
            gate_up.weight,
            down.weight,
            chosen.weights,
            chosen.ids,
            swiglu_limit=chosen.limit,
        )

    def product(self, linear: Linear, x: Tensor, norm: RMSNorm | None) -> Tensor:
        """One product, the norm in front of it fused where that is faster."""
        if norm is None:
            return ops.linear(x, linear.weight, linear.bias)
        return ops.linear(x, linear.weight, linear.bias, norm.weight, norm.eps)

    def gated(self, linear: Linear, x: Tensor, norm: RMSNorm | None) -> Tensor:
        """The gate and up products and the activation in one call."""
        given = () if norm is None else (norm.weight, norm.eps)
        return ops.gated_linear(x, linear.weight, *given)

    def add_to(
        self, linear: Linear, residual: Tensor, x: Tensor, norm: RMSNorm | None
    ) -> Tensor | None:
        """Product, sum and norm fused where that is faster."""
        if norm is None or not planning.linear_fuses_norm(x, linear.weight, linear.bias):
            ops.linear_add(x, residual, linear.weight, linear.bias)
            return None
        return ops.linear_add_rmsnorm(
            x, residual, linear.weight, norm.weight, linear.bias, norm.eps
        )


def leading(linear: Linear | ExpertLinear) -> tuple[int, ...]:
    """Axes of parameters in front of rows: the experts, if it is a map of experts."""
    experts = getattr(linear, "experts", None)
    return () if experts is None else (experts,)


def at_rows(expert: int | None, start: int, size: int) -> Index:
    """Rows of a parameter, or of one expert's part of it."""
    rows = slice(start, start + size)
    return rows if expert is None else (expert, rows)


def reordered(tensor: Tensor, order: Tensor) -> Tensor:
    """Rows of a stored tensor in the order in which a parameter has them."""
    return tensor.index_select(0, order.to(tensor.device))
