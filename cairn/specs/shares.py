"""How heads and widths are divided between the ranks of tensor parallelism."""

from __future__ import annotations

from cairn.errors import BadConfig


def share(count: int, ranks: int, what: str) -> int:
    """How many of `count` things each of the ranks has.

    Raises:
        BadConfig: they cannot be divided evenly.
    """
    if count % ranks:
        raise BadConfig(f"{count} {what} cannot be divided between {ranks} ranks")
    return count // ranks


def share_of_kv_heads(count: int, ranks: int) -> int:
    """KV heads of each rank: where there are more ranks than heads, several ranks hold the same.

    Raises:
        BadConfig: neither is a multiple of the other.
    """
    if ranks > count and ranks % count == 0:
        return 1
    return share(count, ranks, "KV heads")
