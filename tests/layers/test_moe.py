"""Mixtures of experts whose shared expert is one of the experts, or separate, compared with the
formula; as a whole and as the sum over ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cairn.distributed.groups import Group
from cairn.layers.moe import MixtureOfExperts
from cairn.layers.residual import Hidden
from cairn.layers.schemes.base import PlainScheme, Scheme
from cairn.layers.schemes.fp8_block import Fp8BlockScheme
from cairn.layers.weight import Source, Weight
from cairn.models.sharding import Division, divide
from cairn.specs.experts import trivial_placement
from cairn.specs.ffn import MoeFfn, RouterSpec

HIDDEN, EXPERTS, ACTIVE = 24, 5, 2
SOFTMAX = RouterSpec("softmax", renormalize=False)
SIGMOID = RouterSpec("sigmoid", renormalize=True, scale=2.5)
HASHED = RouterSpec("sqrtsoftplus", renormalize=True, scale=1.5, table_rows=7)
FP8 = Fp8BlockScheme((128, 128))


class Rank(Group):
    """A rank whose sums the test computes."""

    def sum(self, x: Tensor) -> Tensor:
        return x


class _Declaring:
    """A module with the mixture, in place of a model."""

    def __init__(self, mixture: MixtureOfExperts) -> None:
        self._mixture = mixture

    def weights(self, stored: frozenset[str] | None) -> list[Weight]:
        return self._mixture.weights(Source("", stored))


def stored(weight: Weight) -> Tensor:
    """A tensor of the checkpoint, which depends only on its name."""
    g = torch.Generator().manual_seed(sum(i * ord(c) for i, c in enumerate(weight.source)))
    if weight.draw == "experts":
        return torch.rand(weight.shape[0], EXPERTS, generator=g).argsort(1)[:, :ACTIVE]
    if weight.source.endswith("scale_inv"):
        return torch.rand(weight.shape, generator=g) / 8 + 0.1
    drawn = torch.randn(weight.shape, generator=g) * weight.shape[-1] ** -0.5
    return drawn.to(torch.float8_e4m3fn) if weight.dtypes == ("F8_E4M3",) else drawn


def built(spec: MoeFfn, scheme: Scheme, group: Group, found: dict[str, Tensor]) -> MixtureOfExperts:
    """The loaded mixture of a rank; the stored tensors are put into `found`."""
    given = {"dtype": torch.float32, "scheme": scheme}
    whole = MixtureOfExperts(spec, HIDDEN, **given)
    own = MixtureOfExperts(spec.of_rank(group.size), HIDDEN, group, **given)
    divide(own, whole)
    for pair in Division(_Declaring(whole), group).shared(own.weights(Source()), None):
        tensors = [stored(weight) for weight in (pair.whole, *pair.whole.beside)]
        names = (weight.source for weight in (pair.whole, *pair.whole.beside))
        found.update(zip(names, tensors, strict=True))
        # Experts of other ranks have no tensors.
        if pair.own.parameter is not None:
            pair.fill(*tensors)
    return own


def matrix(found: dict[str, Tensor], name: str) -> Tensor:
    """A matrix of the checkpoint in float64."""
    codes, scale = found[f"{name}.weight"].double(), found.get(f"{name}.weight_scale_inv")
    if scale is None:
        return codes
    wide = scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return codes * wide[: codes.shape[0], : codes.shape[1]]


def formula(spec: MoeFfn, found: dict[str, Tensor], x: Tensor, ids: Tensor) -> Tensor:
    """The mixture as a sum over experts, in float64."""

    def mlp(name: str) -> Tensor:
        gate, up, down = (matrix(found, f"{name}.{p}_proj") for p in ("gate", "up", "down"))
        return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

    router, logits = spec.router, x @ found["gate.weight"].double().T
    score = {"softmax": logits.softmax(-1), "sigmoid": logits.sigmoid()}.get(router.score)
    if score is None:
        score = torch.nn.functional.softplus(logits).sqrt()
    chosen = score.topk(spec.active, dim=-1).indices
    if router.table_rows:
        chosen = found["gate.tid2eid"][ids]
    weights = torch.zeros_like(score).scatter(1, chosen, score.gather(1, chosen))
    if router.renormalize:
        weights /= weights.sum(-1, keepdim=True)
    y = sum(router.scale * weights[:, e : e + 1] * mlp(f"experts.{e}") for e in range(spec.experts))
    share = 1.0
    if spec.shared_gate:
        share = (x @ found["shared_expert_gate.weight"].double().T).sigmoid()
    return y + share * mlp(spec.shared_name)


@pytest.mark.parametrize(
    "width, shared, gated, router, scheme, ranks, joined",
    [
        (16, 16, True, SOFTMAX, PlainScheme(), 2, True),
        (16, 48, False, SIGMOID, PlainScheme(), 4, True),
        (16, 32, False, HASHED, PlainScheme(), 2, True),
        (256, 512, False, SIGMOID, FP8, 4, True),
        (192, 192, True, SOFTMAX, FP8, 2, True),
        # A block of the shared expert would span two experts.
        (192, 384, False, SIGMOID, FP8, 2, False),
        (16, 24, True, SIGMOID, PlainScheme(), 2, False),
    ],
)
def test_the_shared_expert(
    width: int,
    shared: int,
    gated: bool,
    router: RouterSpec,
    scheme: Scheme,
    ranks: int,
    joined: bool,
) -> None:
    given = {"shared": shared, "shared_gate": gated}
    spec = MoeFfn(EXPERTS, ACTIVE, width, router, **given)
    g = torch.Generator().manual_seed(3)
    x, ids = torch.randn(6, HIDDEN, generator=g), torch.arange(6)
    for size in (1, ranks):
        found: dict[str, Tensor] = {}
        y = torch.zeros(6, HIDDEN)
        for rank in range(size):
            mixture = built(spec, scheme, Rank(rank, size), found)
            assert (mixture.shared is None) == joined
            y += mixture(Hidden(x, ids=ids))
        wanted = formula(spec, found, x.double(), ids)
        assert (y - wanted).abs().max() < 1e-5 * wanted.abs().max()


@pytest.mark.parametrize(
    "width, shared, gated, router, scheme",
    [
        (16, 32, False, HASHED, PlainScheme()),
        (16, 64, True, SOFTMAX, PlainScheme()),
        (128, 256, False, SIGMOID, FP8),
        # A rank's part is half an expert.
        (16, 16, True, SOFTMAX, PlainScheme()),
    ],
)
def test_the_shared_expert_beside_whole_experts(
    width: int, shared: int, gated: bool, router: RouterSpec, scheme: Scheme
) -> None:
    """Two ranks, which have copies of some experts."""
    placement = trivial_placement(EXPERTS, 2, 2)
    places = shared // (2 * width)
    given = {"shared": shared, "shared_gate": gated, "shared_places": places}
    spec = MoeFfn(EXPERTS, ACTIVE, width, router, placement=placement, **given)
    g = torch.Generator().manual_seed(3)
    x, ids = torch.randn(6, HIDDEN, generator=g), torch.arange(6)
    found: dict[str, Tensor] = {}
    y = torch.zeros(6, HIDDEN)
    for rank in range(2):
        mixture = built(spec, scheme, Rank(rank, 2), found)
        assert (mixture.shared is None) == (places > 0)
        y += mixture(Hidden(x, ids=ids, slots=torch.arange(6) % 2))
        mixture.places.loads = torch.zeros(EXPERTS, dtype=torch.int64)
        mixture(Hidden(x, ids=ids, slots=ids))
        assert mixture.places.loads.sum() == 6 * ACTIVE
    wanted = formula(spec, found, x.double(), ids)
    assert (y - wanted).abs().max() < 1e-5 * wanted.abs().max()
