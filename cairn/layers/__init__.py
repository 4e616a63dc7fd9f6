"""Layers: parameters and calls of the ops that read them. Independent of configs and models."""
