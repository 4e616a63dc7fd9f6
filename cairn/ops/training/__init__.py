"""Ops that training differentiates."""
