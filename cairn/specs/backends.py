"""Names of the attention backends; `cairn.attention.registry` maps them to their classes."""

DENSE = "dense"
WINDOW = "window"
HSA = "hsa"
MLA = "mla"
GATED_DELTA = "gated_delta"
COMPRESSED = "compressed"
