"""Specs of models as frozen dataclasses: layers, mixers and feed-forward layers. No torch."""
