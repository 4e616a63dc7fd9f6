"""Parameters, bytes and operations of compressed attention, for `cairn.bench.roofline`."""

from __future__ import annotations

from cairn.specs.compressed import CompressedSpec


def parameters(mixer: CompressedSpec, hidden: int) -> int:
    """Matrix parameters of a layer."""
    heads = mixer.num_heads * mixer.head_dim
    count = hidden * (mixer.q_lora_rank + mixer.head_dim) + heads * mixer.q_lora_rank
    count += mixer.out_rank * heads + mixer.out_groups * mixer.out_rank * hidden
    own = mixer.compression
    if own is not None:
        wide = 1 + own.overlap
        count += 2 * hidden * wide * (mixer.head_dim + own.index_dim) + hidden * own.index_heads
        count += mixer.q_lora_rank * own.index_heads * own.index_dim
    return count


def query_bytes(mixer: CompressedSpec, slots: int, size: int) -> float:
    """Cache bytes that one query at slot `slots` reads and writes; size: bytes per element of a
    record."""
    record, own = mixer.head_dim * size, mixer.compression
    moved = record * (min(slots + 1, mixer.window) + 1.0)
    if own is None:
        return moved
    entries = (slots + 1) // own.rate
    read = min(entries, own.topk) if own.index_heads else entries
    # Without selection (all entries are read) no index scores are computed.
    scored = entries if read < entries else 0
    inputs = 2 * (1 + own.overlap) * 4 * (mixer.head_dim + own.index_dim)
    # Each token's inputs are written once and read by each entry that they contribute to.
    return moved + record * read + own.index_dim * size * scored + inputs * (2 + own.overlap)


def mixing_flops(mixer: CompressedSpec, slots: int) -> float:
    """Floating-point operations of a sequence, without products with weights."""
    query, own = 4.0 * mixer.num_heads * mixer.head_dim, mixer.compression
    few = min(slots, mixer.window)
    total = query * (few * (few + 1) / 2 + (slots - few) * mixer.window)
    if own is None:
        return total
    visible = slots * slots / (2.0 * own.rate)
    if not own.index_heads:
        return total + query * visible
    short = min(slots, own.topk * own.rate)
    selected = short * short / (2.0 * own.rate) + (slots - short) * own.topk
    return total + query * selected + 2.0 * own.index_heads * own.index_dim * visible
