"""Landmark attention: page summaries, page scores, attention inside pages, and the merge with the
window."""
