"""From a joint projection to heads: the split, the norm of every head and its rotation."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.benching import Draw, Point, Points, moved
from cairn.ops.registry import op
from cairn.ops.rotary.head_norm_rope import head_norm_rope
from cairn.ops.rotary.kernels import split_norm_rope_kernel
from cairn.ops.testing import Cases, Make


@op
def split_norm_rope(
    projected: Tensor,
    added: Tensor | None,
    weight: Tensor,
    cos_sin: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and the landmark query z, each head normed and rotated; rounded once at the end.

    The heads of q, then those of k stand first in a row of `projected`. z follows them, or is q
    plus `added` (rounded once, before the norm), or does not exist, as `weight` has heads for it.

    Args:
        projected: [T, W], rows may be strided.
        added: [T, h_q d], what makes q's projection z's; None: no such sum.
        weight: [H, d], norm weight of every head of q, k and, where it exists, z.
        cos_sin: [T, d] float32 = [cos | sin] of each token's angles; None: no rotation.
        num_heads, num_kv_heads: h_q, h_kv; H is h_q + h_kv or 2 h_q + h_kv.
    Returns:
        (q [T, h_q, d], k [T, h_kv, d], z [T, h_q or 0, d]), contiguous.
    """
    heads, dim = weight.shape
    own = heads - num_heads - num_kv_heads
    if added is None:
        joint = projected[:, : heads * dim]
    else:
        both = projected[:, : (num_heads + num_kv_heads) * dim]
        joint = torch.cat((both, added + projected[:, : num_heads * dim]), dim=-1)
    normed = head_norm_rope.reference(joint.unflatten(-1, (heads, dim)), weight, cos_sin, eps)
    # Copies, also of what is contiguous as it is: results of an op do not share memory.
    q, k, z = (
        part.clone(memory_format=torch.contiguous_format)
        for part in normed.split((num_heads, num_kv_heads, own), dim=1)
    )
    return q, k, z


@split_norm_rope.fake
def _(
    projected: Tensor,
    added: Tensor | None,
    weight: Tensor,
    cos_sin: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, (heads, dim) = projected.shape[0], weight.shape
    counts = (num_heads, num_kv_heads, heads - num_heads - num_kv_heads)
    q, k, z = (projected.new_empty(tokens, n, dim) for n in counts)
    return q, k, z


def _accepts(
    projected: Tensor,
    added: Tensor | None,
    weight: Tensor,
    cos_sin: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    eps: float = 1e-6,
) -> bool:
    return (
        projected.stride(-1) == 1
        and weight.is_contiguous()
        and (added is None or added.stride(-1) == 1)
        and (cos_sin is None or cos_sin.is_contiguous())
    )


@split_norm_rope.implementation("triton", devices=gpu.DEVICES, when=_accepts, replayed=True)
def _(
    projected: Tensor,
    added: Tensor | None,
    weight: Tensor,
    cos_sin: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, (heads, dim) = projected.shape[0], weight.shape
    counts = (num_heads, num_kv_heads, heads - num_heads - num_kv_heads)
    q, k, z = (gpu.empty((tokens, n, dim), projected.dtype, projected.device) for n in counts)
    at_once = min(16, gpu.next_power_of_2(heads))
    if tokens:
        split_norm_rope_kernel[(tokens, -(-heads // at_once))](
            *(projected, projected if added is None else added, weight),
            *(projected if cos_sin is None else cos_sin, q, k, z, projected.stride(0)),
            *(0 if added is None else added.stride(0), eps, num_heads, num_kv_heads, heads),
            *(dim // 2, gpu.next_power_of_2(dim // 2), at_once),
            *(added is not None, cos_sin is not None),
            num_warps=4,
        )
    return q, k, z


def turned_heads(
    projected: Tensor,
    added: Tensor | None,
    weight: Tensor,
    cos_sin: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
) -> Tensor:
    """All heads of q, k and z, before they are rounded, in few passes: [T, H, d] float32."""
    heads, dim = weight.shape
    if added is None:
        joint = projected[:, : heads * dim]
    else:
        both = projected[:, : (num_heads + num_kv_heads) * dim]
        joint = torch.cat((both, added + projected[:, : num_heads * dim]), dim=-1)
    y = joint.unflatten(-1, (heads, dim)).float()
    y = torch.nn.functional.rms_norm(y, (dim,), None, eps).mul_(weight)
    if cos_sin is None:
        return y
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    halves = y.unflatten(-1, (2, -1))
    turned: Tensor = halves * cos.unsqueeze(2)
    turned[:, :, 0].addcmul_(halves[:, :, 1], sin, value=-1)
    turned[:, :, 1].addcmul_(halves[:, :, 0], sin)
    return turned.flatten(2)


@split_norm_rope.implementation("in_place", devices=("cpu",))
def _(
    projected: Tensor,
    added: Tensor | None,
    weight: Tensor,
    cos_sin: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    given = (projected, added, weight, cos_sin, num_heads, num_kv_heads, eps)
    own = weight.shape[0] - num_heads - num_kv_heads
    form = {"copy": True, "memory_format": torch.contiguous_format}
    q, k, z = (
        part.to(projected.dtype, **form)
        for part in turned_heads(*given).split((num_heads, num_kv_heads, own), dim=1)
    )
    return q, k, z


@split_norm_rope.cases
def _(make: Make) -> Cases:
    for dtype in (torch.float32, torch.bfloat16):
        angles = make.randn(5, 16)
        wide = make.randn(5, 4 * 16 + 2 * 16 + 2 * 16 + 7, dtype=dtype)
        up = make.randn(5, 4 * 16, dtype=dtype)
        yield make.args(wide, up, make.randn(10, 16, dtype=dtype), angles, 4, 2)
        yield make.args(wide, None, make.randn(6, 16, dtype=dtype), angles, 4, 2, 1e-5)
        own = make.randn(5, (4 + 2 + 4 + 2) * 16, dtype=dtype)
        yield make.args(own, None, make.randn(10, 16, dtype=dtype), None, 4, 2)
        weight = make.randn(6, 24, dtype=dtype)
        yield make.args(make.randn(3, 200, dtype=dtype), None, weight, make.randn(3, 24), 5, 1)
    yield make.args(make.randn(0, 96), None, make.randn(6, 16), make.randn(0, 16), 4, 2)


@split_norm_rope.bench
def _(draw: Draw) -> Points:
    for layer, rows in draw.rows():
        q, kv, dim = layer.heads, layer.kv_heads, layer.head_dim
        heads = 2 * q + kv
        projected, weight = draw.randn(rows, (heads + kv) * dim), draw.randn(heads, dim)
        angles = draw.randn(rows, dim, dtype=torch.float32)
        read = projected[:, : heads * dim]
        yield Point(
            f"{layer.name}: {rows} x {heads} x {dim}",
            draw.args(projected, None, weight, angles, q, kv),
            moved(read, read, weight, angles),
            alternatives=draw.by_torch(split_norm_rope.reference),
        )
