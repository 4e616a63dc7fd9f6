"""`rotary_embedding` as callers use it: the op, which rotates in place, and its arguments as the
result."""

from __future__ import annotations

from torch import Tensor

from cairn.ops.rotary.rotary_embedding import rotary_embedding as in_place


@in_place.front
def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Rotate the first rd elements of every head of query and key, in place.

    Products and sums are in float32 whatever the dtypes; the result is rounded once.

    Args:
        positions: [T] or [B, S] int32 or int64, rows of cos_sin_cache.
        query: [..., n * head_size] or [..., n, head_size] float32, bfloat16 or float16, leading
            shape as positions; tokens and heads may be strided.
        key: as query, of its dtype, with its own n; or None.
        cos_sin_cache: [max, rd] = [cos | sin], rd / 2 of each; query's dtype or float32.
        is_neox: element i is paired with i + rd / 2; otherwise 2i with 2i + 1.
    Returns:
        (query, key) as they were given, rotated.
    Raises:
        BadArgument: for another shape, dtype or device, or (on a CPU) a position out of range.
    """
    in_place(positions, query, key, head_size, cos_sin_cache, is_neox)
    return query, key
