"""Block-scaled fp8 matrices that ranks divide, also within blocks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cairn.distributed.groups import Group
from cairn.layers.linear import ExpertLinear, Experts
from cairn.layers.schemes.base import Chosen, Rows
from cairn.layers.schemes.fp8_block import Fp8BlockScheme
from cairn.layers.weight import Source, Weight
from cairn.models.sharding import Division, divide

EXPERTS, HIDDEN = Experts(2), 160


def maps(width: int) -> torch.nn.ModuleDict:
    """The two matrices of experts of a width."""
    up, down = [Rows("gate_proj", width), Rows("up_proj", width)], [Rows("down_proj", HIDDEN)]
    given = {"dtype": torch.float32, "scheme": Fp8BlockScheme((128, 128))}
    first = ExpertLinear(EXPERTS, HIDDEN, up, "gate_up_proj", **given)
    return torch.nn.ModuleDict(
        {"up": first, "down": ExpertLinear(EXPERTS, width, down, "down_proj", **given)}
    )


def drawn(name: str, shape: tuple[int, ...]) -> Tensor:
    """A stored tensor."""
    g = torch.Generator().manual_seed(len(name) * 1000 + sum(map(ord, name)))
    if name.endswith("scale_inv"):
        return torch.rand(shape, generator=g) + 0.1
    return torch.randn(shape, generator=g).to(torch.float8_e4m3fn)


def fill(own: torch.nn.ModuleDict, whole: torch.nn.ModuleDict, group: Group) -> None:
    """Load the parameters of a rank from a checkpoint."""
    for name, part in own.items():
        division = Division(_Declaring(whole[name]), group)
        for weight in division.shared(part.weights(Source()), None):
            weight.fill(drawn(weight.whole.source, weight.whole.shape))


class _Declaring:
    """A module with the parameter, in place of a model."""

    def __init__(self, linear: ExpertLinear) -> None:
        self._linear = linear

    def weights(self, stored: frozenset[str] | None) -> list[Weight]:
        return self._linear.weights(Source("", stored))


def run(own: torch.nn.ModuleDict) -> Tensor:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(3, HIDDEN, generator=g)
    chosen = Chosen(torch.rand(3, 1, generator=g), torch.tensor([[0], [1], [0]]).int())
    return own["up"].scheme.experts(own["up"], own["down"], x, chosen)


@pytest.mark.parametrize(("width", "ranks"), [(320, (2, 5, 8)), (512, (8,))])
def test_parts_of_experts_add_up_to_the_whole(width: int, ranks: tuple[int, ...]) -> None:
    whole = maps(width)
    fill(whole, whole, Group())
    wanted = run(whole)
    for size in ranks:
        total = torch.zeros_like(wanted)
        for rank in range(size):
            own, every = maps(width // size), maps(width)
            divide(own, every)
            fill(own, every, Group(rank, size))
            total += run(own)
        assert (total - wanted).abs().max() < 1e-5 * wanted.abs().max()
