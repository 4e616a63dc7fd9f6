"""The largest numbers of a row, as positions or places in a cache."""
