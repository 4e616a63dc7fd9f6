"""Masks of grammars."""
