"""Caches that models other than this engine's use, and memory that is only looked at."""
