"""Small steps between the large ones: joins, casts, positions, the Hadamard transform."""
