"""Logging, metrics, traces and progress bars. Imports no torch."""
