"""Feed-forward layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Self

from cairn.specs.shares import share

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class FfnNames:
    """Names of the matrices of a gated linear unit in a checkpoint."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True, slots=True)
class DenseFfn:
    """Gated linear unit: down(activation(gate x) * up x).

    Attributes:
        intermediate: intermediate width.
        activation: "silu", or "gelu_tanh", gelu's approximation by tanh.
        limit: gate x is clamped to at most limit, up x to [-limit, limit]; 0: no limit.
        names: of the matrices.
    """

    intermediate: int
    activation: Activation = "silu"
    limit: float = 0.0
    names: FfnNames = FfnNames()

    def of_rank(self, ranks: int) -> Self:
        """One rank's part. Raises BadConfig if it cannot be divided."""
        return replace(self, intermediate=share(self.intermediate, ranks, "rows of an MLP"))

    @property
    def description(self) -> str:
        """Description for `cairn inspect`."""
        name = "SwiGLU" if self.activation == "silu" else "GEGLU"
        return f"{name} of width {self.intermediate}"


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """How tokens choose their experts.

    Attributes:
        score: "softmax" over all experts, or of each "sigmoid" or "sqrtsoftplus",
            sqrt(log(1 + e^x)).
        renormalize: weights of the chosen experts are divided by their sum.
        scale: factor of the weights after that.
        bias: a learned correction is added to scores for the choice, not to the weights.
        groups: groups of experts; a group's score is the sum of its two best corrected scores.
        top_groups: groups whose experts may be chosen.
        table_rows: rows of a table that gives the experts of every token id; 0: there is none, and
            the best are chosen.
        bias_name: of the correction in a checkpoint.
    """

    score: Literal["softmax", "sigmoid", "sqrtsoftplus"]
    renormalize: bool
    scale: float = 1.0
    bias: bool = False
    groups: int = 1
    top_groups: int = 1
    table_rows: int = 0
    bias_name: str = "gate.e_score_correction_bias"


@dataclass(frozen=True, slots=True)
class MoeFfn:
    """Mixture of SwiGLU experts, with an optional expert that every token runs.

    Attributes:
        experts: number of routed experts, E.
        active: experts that a token runs, k.
        intermediate: width inside an expert.
        router: how a token chooses.
        shared: width inside the shared expert; 0: there is none.
        shared_gate: the shared expert's output is multiplied by sigmoid(w x), a scalar a token.
        shared_name: the shared expert's name in a checkpoint.
        limit, names: of all experts, see `DenseFfn`.
        placement: the expert in every place of all ranks, rank by rank (expert parallelism); empty:
            each rank has a part of every expert.
        shared_places: with a placement, experts of this width that the shared one's part of a rank
            is; 0: it is a gated unit of its own.
    """

    experts: int
    active: int
    intermediate: int
    router: RouterSpec
    shared: int = 0
    shared_gate: bool = False
    shared_name: str = "shared_expert"
    limit: float = 0.0
    names: FfnNames = FfnNames()
    placement: tuple[int, ...] = ()
    shared_places: int = 0

    def of_rank(self, ranks: int) -> Self:
        """A part of every expert, or whole experts by the placement, and a part of the shared one,
        for one of several ranks; all ranks have the router. Raises BadConfig if experts cannot be
        divided."""
        inner = self.intermediate
        return replace(
            self,
            intermediate=inner if self.placement else share(inner, ranks, "rows of an expert"),
            shared=share(self.shared, ranks, "rows of the shared expert"),
        )

    @property
    def description(self) -> str:
        """In words, for `cairn inspect`."""
        text = f"{self.active} of {self.experts} experts of width {self.intermediate}"
        return f"{text}, shared expert of width {self.shared}" if self.shared else text


FfnSpec = DenseFfn | MoeFfn
