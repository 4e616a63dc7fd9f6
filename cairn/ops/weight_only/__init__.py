"""Matrix products with 4-bit and 8-bit weights: AWQ, GPTQ, Marlin, QServe and the engine's own
layout."""
