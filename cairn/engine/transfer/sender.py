"""Serves records to other engines, with one thread per connection."""

from __future__ import annotations

import contextlib
import logging
import socket
import socketserver
import struct
import threading

import numpy as np

from cairn.cache.host import NAME_BYTES
from cairn.engine.transfer.agent import READ_SECONDS, Agent
from cairn.engine.transfer.identity import Identity
from cairn.engine.transfer.joined import Records
from cairn.engine.transfer.tickets import Ticket, Tickets
from cairn.engine.transfer.wire import VERSION, Answer, Ask, WireError, receive_frame, send_frame
from cairn.errors import BadConfig
from cairn.runner.device_records import DeviceRecords
from cairn.specs.disaggregation import Disaggregation

log = logging.getLogger(__name__)

NAME = struct.Struct(f"{NAME_BYTES}s")
STALL_SECONDS = 10.0
"""Seconds without data from a peer after which its connection is closed."""


class Listener(socketserver.ThreadingTCPServer):
    """The bound port; `serve` begins to answer. Made before weights are loaded, so that a taken
    port is known at once.

    Args:
        how: address, port and secret.

    Raises:
        BadConfig: the port cannot be bound.
    """

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128
    sender: Sender

    def __init__(self, how: Disaggregation) -> None:
        self.address_family = socket.AF_INET6 if ":" in how.host else socket.AF_INET
        try:
            super().__init__((how.host, how.port), _Connection)
        except OSError as error:
            raise BadConfig(
                f"port {how.port} of {how.host} cannot be bound: {error.strerror or error}",
                "Set disaggregation_bootstrap_port (--disaggregation-bootstrap-port) to one that "
                "is free, or end what uses it",
            ) from None

    @property
    def port(self) -> int:
        """The port that was bound."""
        return int(self.server_address[1])

    def serve(self, sender: Sender) -> None:
        """Answer from now on."""
        self.sender = sender
        threading.Thread(target=self.serve_forever, name="cairn-sender", daemon=True).start()

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore failed answers: the peer notices by itself."""
        log.warning("records for %s were not sent", client_address, exc_info=True)


class Sender:
    """Answers requests for records.

    Args:
        tickets: the rights to records.
        records: the records in host memory.
        identity: of this engine.
        secret: see `cairn.engine.transfer.wire`.
        agent: by which others may read the records; None: they are sent.
    """

    def __init__(
        self,
        tickets: Tickets,
        records: Records,
        identity: Identity,
        secret: bytes,
        agent: Agent | None = None,
    ) -> None:
        self._tickets, self._records = tickets, records
        self._identity, self._secret, self._agent = identity, secret, agent

    def answer(self, connection: socket.socket) -> None:
        """Serve one connection."""
        connection.settimeout(STALL_SECONDS)
        try:
            ask = receive_frame(connection, Ask, self._secret)
        except WireError as error:
            log.warning("a request for records was refused: %s", error)
            # Signed with this engine's secret, so that the peer learns the reason.
            self._refuse(connection, error.reason)
            return
        if ask.version != VERSION or ask.model != self._identity.key:
            self._refuse(connection, "version" if ask.version != VERSION else "model")
            return
        ticket = self._tickets.claim(ask.ticket)
        if ticket is None:
            self._refuse(connection, "ticket")
            return
        try:
            self._send(connection, ask, ticket)
        finally:
            self._tickets.end(ask.ticket)

    def _send(self, connection: socket.socket, ask: Ask, ticket: Ticket) -> None:
        found = [
            (kind, ticket.records.get((kind, name)))
            for kind, names in ask.wanted
            for (name,) in NAME.iter_unpack(names[: len(names) // NAME.size * NAME.size])
        ]
        records, sums = self._records, list[int | None]()
        if not isinstance(records, DeviceRecords):
            sums = [None if slot is None else records.sum_of(kind, slot) for kind, slot in found]
        if self._agent is not None and ask.reads == self._agent.backend:
            answer = Answer(sums, agent=self._agent.metadata, addresses=self._addresses(found))
            send_frame(connection, answer, self._secret)
            # The peer sends a byte when it has read them. The answer tells it that they were held
            # until then.
            connection.settimeout(READ_SECONDS)
            connection.sendall(connection.recv(1))
            return
        if isinstance(records, DeviceRecords):
            self._refuse(connection, "backend")
            return
        send_frame(connection, Answer(sums), self._secret)
        for (kind, slot), known in zip(found, sums, strict=True):
            if slot is not None and known is not None:
                connection.sendall(records.content(kind, slot))

    def _addresses(self, found: list[tuple[int, int | None]]) -> bytes:
        """See `Answer`."""
        assert self._agent is not None
        kinds = np.array([kind for kind, _ in found], np.int64)
        slots = np.array([-1 if slot is None else slot for _, slot in found], np.int64)
        addresses, there = np.full(len(found), -1, dtype="<i8"), slots >= 0
        addresses[there] = self._agent.addresses(kinds[there], slots[there])
        return addresses.tobytes()

    def _refuse(self, connection: socket.socket, reason: str) -> None:
        said = self._identity.text if reason == "model" else ""
        send_frame(connection, Answer([], reason, said), self._secret)


class _Connection(socketserver.BaseRequestHandler):
    server: Listener

    def handle(self) -> None:
        # A peer may close the connection at any time.
        with contextlib.suppress(ConnectionError, TimeoutError):
            self.server.sender.answer(self.request)
