"""Serves records to other engines, with one thread per connection."""

from __future__ import annotations

import contextlib
import logging
import socket
import socketserver
import threading

from cairn.engine.transfer.joined import Records
from cairn.engine.transfer.nixl import READ_SECONDS, Agent
from cairn.engine.transfer.tickets import Ticket, Tickets
from cairn.engine.transfer.wire import VERSION, Answer, Ask, WireError, receive_frame, send_frame
from cairn.errors import BadConfig
from cairn.runner.host_records import HostRecords
from cairn.specs.disaggregation import Disaggregation

log = logging.getLogger(__name__)

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
        model: what this engine serves; see `Ask`.
        secret: see `cairn.engine.transfer.wire`.
        agent: by which others may read the records; None: they are sent.
    """

    def __init__(
        self,
        tickets: Tickets,
        records: Records,
        model: bytes,
        secret: bytes,
        agent: Agent | None = None,
    ) -> None:
        self._tickets, self._records = tickets, records
        self._model, self._secret, self._agent = model, secret, agent

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
        if ask.version != VERSION or ask.model != self._model:
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
        found = [(kind, ticket.records.get((kind, name))) for kind, name in ask.wanted]
        sums = [None if slot is None else self._records.sum_of(kind, slot) for kind, slot in found]
        coming = [
            (kind, slot)
            for (kind, slot), known in zip(found, sums, strict=True)
            if slot is not None and known is not None
        ]
        if ask.reads and self._agent is not None and isinstance(self._records, HostRecords):
            places = [self._records.place(kind, slot)[0] for kind, slot in coming]
            answer = Answer(sums, agent=self._agent.metadata, addresses=places)
            send_frame(connection, answer, self._secret)
            # The connection ends when they have been read. Records overwritten after that fail
            # their checksum.
            connection.settimeout(READ_SECONDS)
            connection.recv(1)
            return
        send_frame(connection, Answer(sums), self._secret)
        for kind, slot in coming:
            connection.sendall(self._records.content(kind, slot))

    def _refuse(self, connection: socket.socket, reason: str) -> None:
        send_frame(connection, Answer([], reason, self._model), self._secret)


class _Connection(socketserver.BaseRequestHandler):
    server: Listener

    def handle(self) -> None:
        # A peer may close the connection at any time.
        with contextlib.suppress(ConnectionError, TimeoutError):
            self.server.sender.answer(self.request)
