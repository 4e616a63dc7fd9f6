"""Trains small HiLS models from scratch, and writes them as folders the engine serves."""
