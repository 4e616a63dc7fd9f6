"""Requests, scheduling and output: the loop around the runner. Start reading at `core.py`."""
