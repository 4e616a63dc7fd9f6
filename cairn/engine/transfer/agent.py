"""Agents read records of other engines, which are then not sent over the connection."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

READ_SECONDS = 60.0
"""Timeout of a read; the other engine holds the records for as long."""


class ReadFailed(Exception):
    """Records were not read.

    Args:
        message: for the log.
        writing: the memory that they go to may still be written.
    """

    def __init__(self, message: str, writing: bool = False) -> None:
        super().__init__(message)
        self.writing = writing


class Agent(Protocol):
    """Lets others read this engine's records, and reads those of others.

    Attributes:
        backend: value of disaggregation_transfer_backend; the same in both engines.
        metadata: what other agents need to read this engine's records.
    """

    backend: str
    metadata: bytes

    def addresses(self, kinds: Ints, slots: Ints) -> Ints:
        """Addresses of records for other agents, by kind and slot."""

    def read(self, metadata: bytes, kinds: Ints, slots: Ints, addresses: Ints) -> None:
        """Read records of another agent into slots of this engine; returns when done.

        Args:
            metadata: of the other agent.
            kinds, slots: kind and target of each record.
            addresses: of the records, from the other agent.
        Raises:
            ReadFailed: the records could not be read.
        """

    def forget(self, metadata: bytes) -> None:
        """Release what is held of another agent, whose process may have ended."""
