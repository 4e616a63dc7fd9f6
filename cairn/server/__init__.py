"""The OpenAI-compatible server: the API process. It imports no torch."""
