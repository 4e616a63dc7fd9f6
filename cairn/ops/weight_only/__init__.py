"""Products with weights of 4 and 8 bits: AWQ, GPTQ, Marlin, QServe and our own layout."""
