"""What a model is, as frozen values: its layers, their mixers and feed-forward parts. No torch."""
