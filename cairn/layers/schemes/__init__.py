"""How a linear map keeps its matrix and multiplies with it: plain, or quantised."""
