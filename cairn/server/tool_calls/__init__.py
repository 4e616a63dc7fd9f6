"""Parsers of tool calls: one file per kind of markup, and the formats that models use."""
