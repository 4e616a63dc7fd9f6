"""Landmark selection: summaries, scores, page attention and its combination with the window."""
