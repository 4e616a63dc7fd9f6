"""FlashAttention's front ends: whole, ragged and paged keys, windows, chunks, sinks."""
