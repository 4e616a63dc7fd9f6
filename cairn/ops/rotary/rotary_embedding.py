"""Rotary position embedding (Su et al. 2021, equation 34), applied in place."""

from __future__ import annotations

from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.registry import op
from cairn.ops.rotary import launch


@op(mutates=("query", "key"))
def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool = True,
) -> None:
    """Rotate query and key in place, as `rotated.rotary_embedding` does, without returning them.

    A registered op may not return its arguments.
    """
    cos_sin = cos_sin_cache.index_select(0, positions.flatten()).float()
    cos, sin = cos_sin.chunk(2, dim=-1)
    launch.rotate(query, cos, sin, head_size, is_neox)
    if key is not None:
        launch.rotate(key, cos, sin, head_size, is_neox)


@rotary_embedding.check
def _(call: Call) -> None:
    launch.check(
        "rotary_embedding", call.positions, call.query, call.key, call.head_size, call.cos_sin_cache
    )


def _plain(call: Call) -> bool:
    return launch.accepts(call.positions, call.query, call.key, call.head_size, call.cos_sin_cache)


@rotary_embedding.implementation("triton", devices=gpu.DEVICES, when=_plain, replayed=True)
def _(call: Call) -> None:
    launch.launch(
        call.positions, call.query, call.key, call.head_size, call.cos_sin_cache, call.is_neox
    )
