"""Imports every package that registers ops."""

from cairn import ops as _ops  # noqa: F401
from cairn.train import sequence as _sequence  # noqa: F401
