"""Readers of tool calls: one file for each kind of markup, and the forms that models use."""
