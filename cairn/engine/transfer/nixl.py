"""Reads records from the host memory of other engines by NIXL: over RDMA where there is any, over
TCP elsewhere. What is asked and answered still passes through `wire`."""

from __future__ import annotations

import importlib
import threading
import time
import uuid
from types import ModuleType
from typing import Any

import numpy as np

from cairn.engine.transfer.agent import READ_SECONDS, Ints, ReadFailed
from cairn.errors import BadConfig
from cairn.runner.host_records import HostRecords
from cairn.specs.disaggregation import NIXL

MODULES = ("nixl", "nixl_cu13", "nixl_cu12")
"""Names under which the package is installed."""
WAITING = 0.0005
"""Seconds between two looks at a read."""


class NixlAgent:
    """An `Agent` for records in host memory.

    Args:
        records: all of them are registered.

    Raises:
        BadConfig: NIXL is not installed, or does not start.
    """

    backend = NIXL

    def __init__(self, records: HostRecords) -> None:
        module = _module()
        self._records = records
        try:
            self._agent: Any = module.nixl_agent(uuid.uuid4().hex, module.nixl_agent_config())
            regions = [(*region, 0, "") for region in records.regions()]
            self._agent.register_memory(regions, "DRAM")
            self.metadata: bytes = self._agent.get_agent_metadata()
        except Exception as error:
            raise BadConfig(
                f"disaggregation_transfer_backend is nixl, which does not start: {error}",
                "Look at its messages above, or use tcp",
            ) from error
        self._names: dict[bytes, str] = {}
        self._lock = threading.Lock()

    def addresses(self, kinds: Ints, slots: Ints) -> Ints:
        """See `Agent`: in this process's memory."""
        return np.array([at for at, _ in self._places(kinds, slots)], dtype=np.int64)

    def _places(self, kinds: Ints, slots: Ints) -> list[tuple[int, int]]:
        pairs = zip(kinds.tolist(), slots.tolist(), strict=True)
        return [self._records.place(kind, slot) for kind, slot in pairs]

    def read(self, metadata: bytes, kinds: Ints, slots: Ints, addresses: Ints) -> None:
        """See `Agent`."""
        places = self._places(kinds, slots)
        here = [(address, size, 0) for address, size in places]
        there = [(at, size, 0) for at, (_, size) in zip(addresses.tolist(), places, strict=True)]
        try:
            with self._lock:
                if metadata not in self._names:
                    self._names[metadata] = self._agent.add_remote_agent(metadata)
                descriptions = [self._agent.get_xfer_descs(x, "DRAM") for x in (here, there)]
                name = self._names[metadata]
                read = self._agent.initialize_xfer("READ", *descriptions, name)
                state = self._agent.transfer(read)
        except Exception as error:
            raise ReadFailed(f"NIXL cannot read from the peer: {error}") from error
        try:
            deadline = time.monotonic() + READ_SECONDS
            while state == "PROC" and time.monotonic() < deadline:
                time.sleep(WAITING)
                with self._lock:
                    state = self._agent.check_xfer_state(read)
        finally:
            self._release(read)
        if state != "DONE":
            raise ReadFailed(f"a read by NIXL ended in the state {state}")

    def forget(self, metadata: bytes) -> None:
        """See `Agent`: no memory of others is held."""

    def _release(self, read: Any) -> None:
        """Raises ReadFailed where a read can neither be ended nor be waited for."""
        try:
            with self._lock:
                self._agent.release_xfer_handle(read)
        except Exception as error:
            raise ReadFailed(f"a read by NIXL does not end: {error}", writing=True) from error


def _module() -> ModuleType:
    for name in MODULES:
        try:
            return importlib.import_module(f"{name}._api")
        except ImportError:
            continue
    raise BadConfig(
        "disaggregation_transfer_backend is nixl, which is not installed",
        "pip install 'cairn-llm[nixl]', or use tcp",
    )
