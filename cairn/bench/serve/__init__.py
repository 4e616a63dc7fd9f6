"""Measures a running server from outside: load, decode stall and soak, over the OpenAI API."""
