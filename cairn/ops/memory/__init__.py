"""Caches that models other than this engine's use, rows of tables, memory that is looked at."""
