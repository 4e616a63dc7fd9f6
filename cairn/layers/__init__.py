"""Layers: parameters and the ops that read them. Nothing here knows a config or a model."""
