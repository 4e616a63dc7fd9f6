"""Ranks: processes with a device each, that hold a share of one model."""
