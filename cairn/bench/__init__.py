"""Measurements: the machine, a model on it, its roofline, and the engine against it."""
