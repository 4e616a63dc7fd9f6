"""The residual stream of a step; all its additions and norms are done here."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from cairn import ops
from cairn.layers.linear import Linear
from cairn.layers.norm import RMSNorm
from cairn.layers.weight import Source, Weight
from cairn.specs.model import StreamsSpec


class Hidden(NamedTuple):
    """Input of a mixer or feed-forward part: the residual stream and the norm to apply.

    Attributes:
        x: [T, hidden].
        norm: norm still to be applied to x, which a product may fuse. None: none.
        ids: [T] int64, the token ids, for layers that read them (hash routing).
        slots: [T] int64, each token's position in its sequence, likewise.
    """

    x: Tensor
    norm: RMSNorm | None = None
    ids: Tensor | None = None
    slots: Tensor | None = None

    def value(self) -> Tensor:
        """x after the norm, [T, hidden]."""
        return self.x if self.norm is None else self.norm(self.x)


class Product(NamedTuple):
    """Output of a mixer or feed-forward part before its last matrix product, so that the product
    and the residual add can be fused.

    Attributes:
        linear: the last linear map of a mixer or feed-forward layer.
        x: [T, in], its input.
    """

    linear: Linear
    x: Tensor

    def value(self) -> Tensor:
        """The delta, [T, hidden]."""
        product: Tensor = self.linear(self.x)
        return product


Delta = Tensor | Product


class Residual:
    """The residual stream.

    Args:
        x: [T, hidden], the embedded tokens; changed in place.
        ids: [T] int64, the tokens' ids; None: no layer reads them.
        slots: [T] int64, their positions in their sequences, likewise.
    """

    def __init__(self, x: Tensor, ids: Tensor | None = None, slots: Tensor | None = None) -> None:
        self.x, self.ids, self.slots = x, ids, slots
        self._normed: tuple[RMSNorm, Tensor] | None = None

    def read(self, norm: RMSNorm | None, site: Site | None = None) -> Hidden:
        """The stream for a reader, with the norm that the reader applies first, or None.

        Args:
            site: of the reader, where there are several streams.
        """
        if norm is not None and self._normed is not None and self._normed[0] is norm:
            return Hidden(self._normed[1], None, self.ids, self.slots)
        return Hidden(self.x, norm, self.ids, self.slots)

    def add(
        self,
        delta: Delta,
        next_norm: RMSNorm | None = None,
        own_norm: RMSNorm | None = None,
    ) -> None:
        """x += delta.

        Args:
            delta: output of a mixer or a feed-forward layer; a tensor's memory may be reused.
            next_norm: the norm of the next reader, which may be fused.
            own_norm: norm applied to the delta first.
        """
        self._normed, normed = None, None
        if own_norm is not None:
            if isinstance(delta, Product):
                delta.linear.add_normed_to(self.x, delta.x, own_norm)
            else:
                own_norm.add_to(self.x, delta)
        elif isinstance(delta, Product):
            normed = delta.linear.add_to(self.x, delta.x, next_norm)
        elif next_norm is not None:
            normed = next_norm.of_sum(self.x, delta)
        else:
            self.x += delta
        if next_norm is not None and normed is not None:
            self._normed = next_norm, normed


class Streams(Residual):
    """Several residual streams in place of one (hyper-connections).

    A reader gets a weighted sum of them, and its output is added to all of them while they are
    mixed; see `cairn.ops.mhc_pre`.

    Args:
        x: [T, n, hidden], their initial values; changed in place.
        ids, slots: as in `Residual`.
    """

    def __init__(self, x: Tensor, ids: Tensor | None = None, slots: Tensor | None = None) -> None:
        super().__init__(x, ids, slots)
        self._weights: tuple[Tensor, Tensor] | None = None

    def read(self, norm: RMSNorm | None, site: Site | None = None) -> Hidden:
        """The weighted sum of streams that a site reads."""
        assert site is not None, "several streams are read through a site"
        x, *weights = site(self.x)
        self._weights = weights[0], weights[1]
        return Hidden(x, norm, self.ids, self.slots)

    def add(
        self,
        delta: Delta,
        next_norm: RMSNorm | None = None,
        own_norm: RMSNorm | None = None,
    ) -> None:
        """Mix the streams and add a delta, with the weights of the site that was read last."""
        assert self._weights is not None
        value = delta.value() if isinstance(delta, Product) else delta
        if own_norm is not None:
            value = own_norm(value)
        ops.mhc_post(self.x, value, *self._weights)
        self._weights = None


class Site(nn.Module):
    """Connection of a mixer or feed-forward layer to the residual streams.

    Args:
        spec: of the streams.
        hidden: width of each.
    """

    def __init__(self, spec: StreamsSpec, hidden: int) -> None:
        super().__init__()
        self.spec = spec
        rows = (2 + spec.count) * spec.count
        self.fn, self.base = mixing_parameters(rows, spec.count * hidden)
        self.scale = nn.Parameter(torch.empty(3, dtype=torch.float32), requires_grad=False)

    def weights(self, source: Source, name: str) -> list[Weight]:
        """name_fn, name_base and name_scale."""
        return mixing_weights(self, source, name)

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """streams [T, n, hidden] -> the layer's input [T, hidden], and the weights with which its
        output is added to them, see `cairn.ops.mhc_pre`."""
        spec = self.spec
        given = (self.fn, self.scale, self.base, spec.norm_eps, spec.eps, spec.iterations)
        x, post, mix = ops.mhc_pre(streams, *given)
        return x, post, mix


class StreamsHead(nn.Module):
    """Joins the residual streams before the output head.

    Args:
        spec: of the streams.
        hidden: width of each.
    """

    def __init__(self, spec: StreamsSpec, hidden: int) -> None:
        super().__init__()
        self.spec = spec
        self.fn, self.base = mixing_parameters(spec.count, spec.count * hidden)
        self.scale = nn.Parameter(torch.empty(1, dtype=torch.float32), requires_grad=False)

    def weights(self, source: Source, name: str) -> list[Weight]:
        """name_fn, name_base and name_scale."""
        return mixing_weights(self, source, name)

    def forward(self, states: Tensor) -> Tensor:
        """Concatenated streams [T, n * hidden] -> [T, hidden]."""
        spec = self.spec
        streams = states.unflatten(1, (spec.count, -1))
        x: Tensor = ops.mhc_head(streams, self.fn, self.scale, self.base, spec.norm_eps, spec.eps)
        return x


def mixing_parameters(rows: int, width: int) -> tuple[nn.Parameter, nn.Parameter]:
    """fn [rows, width] and base [rows], float32 in every model."""
    fn, base = (torch.empty(shape, dtype=torch.float32) for shape in ((rows, width), (rows,)))
    return nn.Parameter(fn, requires_grad=False), nn.Parameter(base, requires_grad=False)


def mixing_weights(module: Site | StreamsHead, source: Source, name: str) -> list[Weight]:
    """Declarations for a `Site` or a `StreamsHead`."""
    fn, base, scale = module.fn, module.base, module.scale
    return [
        Weight(source.name(f"{name}_fn"), tuple(fn.shape), fn),
        Weight(source.name(f"{name}_base"), tuple(base.shape), base, draw="around_zero"),
        Weight(source.name(f"{name}_scale"), tuple(scale.shape), scale, draw="around_one"),
    ]
