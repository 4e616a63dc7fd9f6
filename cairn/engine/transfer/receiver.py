"""Fetches records from other engines into places of this one's host memory."""

from __future__ import annotations

import itertools
import logging
import socket
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from cairn.cache.host import KINDS
from cairn.engine.transfer.agent import Agent, ReadFailed
from cairn.engine.transfer.identity import Identity
from cairn.engine.transfer.joined import Records
from cairn.engine.transfer.wire import (
    VERSION,
    Answer,
    Ask,
    WireError,
    receive_frame,
    receive_into,
    send_frame,
)
from cairn.runner.device_records import DeviceRecords
from cairn.specs.disaggregation import LOOPBACK

log = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
STALL_SECONDS = 10.0
"""Seconds without data from a peer after which its records are given up."""
AT_ONCE = 4
"""Concurrent fetches; others wait in order."""


class Peer(NamedTuple):
    """The address of records, and the ticket for them."""

    host: str
    port: int
    ticket: bytes


class Wanted(NamedTuple):
    """A record, and the place reserved for it."""

    kind: int
    name: bytes
    slot: int


@dataclass(slots=True, eq=False)
class Fetched:
    """The result of a fetch.

    Attributes:
        arrived: records that arrived intact.
        failure: why others did not, in one word; None: all arrived.
        said: the same as a sentence for logs.
        refused: whether the peer serves another model, so that nothing of it may be used.
        lost: records whose places may still be written: they must not be used again.
    """

    arrived: list[Wanted] = field(default_factory=list)
    failure: str | None = None
    said: str = ""
    refused: bool = False
    lost: list[Wanted] = field(default_factory=list)


class Receiver:
    """Fetches in threads.

    Args:
        records: host memory that is written.
        identity: of this engine.
        secret: see `cairn.engine.transfer.wire`.
        agent: reads records of peers that have one too; None: they send them.
    """

    def __init__(
        self, records: Records, identity: Identity, secret: bytes, agent: Agent | None = None
    ) -> None:
        self._records, self._identity, self._secret = records, identity, secret
        self._agent = agent
        self._agents: dict[tuple[str, int], bytes] = {}
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="cairn-receiver")

    def trusts(self, host: str) -> bool:
        """Whether records of a host may be used: with a secret, those of any host that knows it;
        without one, those of this machine only. A request names the host, and the records enter a
        cache shared with other requests."""
        return bool(self._secret) or host in LOOPBACK

    def fetch(self, peer: Peer, wanted: list[Wanted]) -> Future[Fetched]:
        """Fetch as many of the records as possible; the future never fails. Until it is done, the
        places must not be used."""
        return self._threads.submit(self._fetch, peer, wanted)

    def _fetch(self, peer: Peer, wanted: list[Wanted]) -> Fetched:
        result, address = Fetched(), (peer.host, peer.port)
        try:
            with socket.create_connection(address, CONNECT_SECONDS) as connection:
                connection.settimeout(STALL_SECONDS)
                names = [
                    (kind, b"".join([record.name for record in wanted if record.kind == kind]))
                    for kind in KINDS
                ]
                reads = "" if self._agent is None else self._agent.backend
                ask = Ask(VERSION, self._identity.key, peer.ticket, names, reads)
                send_frame(connection, ask, self._secret)
                answer = receive_frame(connection, Answer, self._secret)
                if answer.refused is None:
                    self._note_agent(address, answer.agent)
                    self._receive(connection, wanted, answer, result)
                else:
                    self._refused(answer, result)
        except WireError as error:
            result.failure, result.said = error.reason, str(error)
        except TimeoutError:
            result.failure, result.said = "timeout", "it does not answer"
        except OSError as error:
            result.failure, result.said = "connection", str(error)
            self._note_agent(address, b"")
        return result

    def _note_agent(self, address: tuple[str, int], agent: bytes) -> None:
        """Note the metadata of the agent at an address, and forget an earlier agent there; empty:
        there is no agent any more."""
        before = self._agents.pop(address, b"")
        if agent:
            self._agents[address] = agent
        if self._agent is not None and before and before != agent:
            self._agent.forget(before)

    def _receive(
        self, connection: socket.socket, wanted: list[Wanted], answer: Answer, result: Fetched
    ) -> None:
        if isinstance(self._records, DeviceRecords):
            if not answer.agent:
                raise WireError("backend", "it has another disaggregation_transfer_backend")
            read = self._read(wanted, answer, result)
            _expect_held(connection)
            result.arrived += read
            return
        if answer.agent:
            self._read(wanted, answer, result)
        coming = [
            (record, expected)
            for record, expected in zip(wanted, answer.sums, strict=False)
            if expected is not None
        ]
        if len(coming) < len(wanted):
            result.failure, result.said = "missing", "it has not all records"
        for record, expected in coming:
            if not answer.agent:
                receive_into(connection, self._records.record(record.kind, record.slot))
            if self._records.seal(record.kind, record.slot) == expected:
                result.arrived.append(record)
            else:
                result.failure, result.said = "damaged", "a record came damaged"

    def _read(self, wanted: list[Wanted], answer: Answer, result: Fetched) -> list[Wanted]:
        """Read records through the agent instead of receiving them; returns those that the peer
        has. In host memory, checksums detect those that were not read."""
        assert self._agent is not None
        kinds = np.array([record.kind for record in wanted], np.int64)
        slots = np.array([record.slot for record in wanted], np.int64)
        addresses = np.frombuffer(answer.addresses, dtype="<i8")
        if len(addresses) != len(wanted):
            raise WireError("protocol", f"{len(addresses)} addresses for {len(wanted)} records")
        there = addresses >= 0
        if not there.all():
            result.failure, result.said = "missing", "it has not all records"
            wanted = list(itertools.compress(wanted, there))
        if not wanted:  # agents need something to read
            return wanted
        try:
            self._agent.read(answer.agent, kinds[there], slots[there], addresses[there])
        except ReadFailed as error:
            if error.writing:
                result.lost += wanted
            raise WireError(self._agent.backend, str(error)) from error
        return wanted

    def _refused(self, answer: Answer, result: Fetched) -> None:
        result.failure = answer.refused
        if answer.refused == "ticket":
            result.said = "the ticket was used, has expired or never was"
        elif answer.refused == "model":
            result.refused = True
            difference = self._identity.difference(answer.model)
            result.said = f"it serves another model, or with other options: {difference}"
        elif answer.refused == "backend":
            result.said = "it has another disaggregation_transfer_backend"
        elif answer.refused == "version":
            result.said = "it runs another version of cairn"
        else:
            result.said = f"it refused: {answer.refused}"


def _expect_held(connection: socket.socket) -> None:
    """Ask whether the peer held the records until now: the memory of a process that has ended may
    be another's already. Raises OSError if it did not."""
    connection.sendall(b"\0")
    receive_into(connection, memoryview(bytearray(1)))
