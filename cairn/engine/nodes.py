"""Ranks on other hosts: node 0 accepts one connection of each other node and sends its orders.

    node 0 -> node  Challenge
    node -> node 0  Hello            signed with the secret, over the challenge
    node 0 -> node  Welcome
    node 0 -> node  orders, each behind its length; of length 0: a beat
    node -> node 0  Beat, at last Died

Each side detects that the other is gone: at once when the connection ends, otherwise by a timeout.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch
import torch.distributed

from cairn.engine.transfer.wire import WireError, receive_frame, send_frame
from cairn.errors import BadConfig, EngineDead
from cairn.obs.log import get_logger
from cairn.runner.orders import FRAME
from cairn.specs.nodes import Nodes
from cairn.version import __version__

log = get_logger(__name__)

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 5.0
"""Seconds without a message after which a node counts as gone."""
VERSIONS = f"cairn {__version__} with torch {torch.__version__}"
ORDERS = "cairn/orders"
"""Key of torchrun's store: where node 0 is."""


class Challenge(msgspec.Struct, frozen=True, tag=True):
    """The challenge that a Hello must contain."""

    nonce: bytes


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A node's registration at node 0.

    Attributes:
        nonce: the challenge's nonce.
        versions: versions of the software on the node.
        node, nodes: its index, and the number of nodes.
    """

    nonce: bytes
    versions: str
    node: int
    nodes: int


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """Node 0's reply: what the node has to run.

    Attributes:
        store: port of the store at which ranks meet.
        ranks: of all nodes.
        device: kind of device.
        refused: why the node is refused; None: accepted.
    """

    store: int
    ranks: int
    device: str
    refused: str | None = None


class Beat(msgspec.Struct, frozen=True, tag=True):
    """Sign of life of a node."""


class Died(msgspec.Struct, frozen=True, tag=True):
    """A rank of the node has ended."""

    reason: str
    hint: str | None = None


FromNode: Any = Beat | Died


class Link:
    """Node 0's connection to another one.

    Args:
        node: its number.
        connection: the accepted connection.
        secret: key that signs its frames.
    """

    def __init__(self, node: int, connection: socket.socket, secret: bytes) -> None:
        self.node, self._connection, self._secret = node, connection, secret
        self._sending = threading.Lock()
        self._reason: EngineDead | None = None
        connection.settimeout(SILENCE_SECONDS)
        threading.Thread(target=self._listen, name=f"node {node}", daemon=True).start()
        threading.Thread(target=self._beat, name=f"beat {node}", daemon=True).start()

    @property
    def reason(self) -> EngineDead | None:
        """Why the node is gone; None: it is connected."""
        return self._reason

    def send(self, frame: bytes) -> None:
        """Send an order behind its length. Raises OSError if the node is gone."""
        with self._sending:
            self._connection.sendall(frame)

    def close(self) -> None:
        """End the connection, and the node's ranks with it."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _listen(self) -> None:
        try:
            while True:
                message = receive_frame(self._connection, FromNode, self._secret)
                if isinstance(message, Died):
                    self._reason = EngineDead(message.reason, message.hint)
                    return
        except TimeoutError:
            self._gone(f"gave no sign of life for {SILENCE_SECONDS:.0f} s")
        except (OSError, WireError) as error:
            self._gone(f"ended its connection ({error})")

    def _gone(self, how: str) -> None:
        hint = "Look at its last log lines"
        self._reason = self._reason or EngineDead(f"node {self.node} {how}", hint)

    def _beat(self) -> None:
        with contextlib.suppress(OSError):
            while self._reason is None:
                self.send(FRAME.pack(0))
                time.sleep(BEAT_SECONDS)


class Meeting:
    """Node 0's listener for the other nodes; binds the port at once.

    Args:
        nodes: of which this one is number 0.
        listener: descriptor of a socket that listens there already; None: there is none.

    Raises:
        BadConfig: the port cannot be bound.
    """

    def __init__(self, nodes: Nodes, listener: int | None = None) -> None:
        self._nodes = nodes
        if listener is not None:
            self._listener = socket.socket(fileno=listener)
            return
        port = 0 if nodes.launched else nodes.port
        family = socket.AF_INET6 if ":" in nodes.host else socket.AF_INET
        try:
            self._listener = socket.create_server((nodes.host, port), family=family, backlog=128)
        except OSError as error:
            raise BadConfig(
                f"port {port} of {nodes.host} cannot be bound: {error.strerror or error}",
                "Set dist_init_addr (--dist-init-addr) to a free port of this node, on all nodes",
            ) from None
        if nodes.launched:
            torchrun_store(nodes).set(ORDERS, str(self._listener.getsockname()[1]))

    def accept(
        self, store: int, ranks: int, device: str, reported: Callable[[], str]
    ) -> list[Link]:
        """Wait for all other nodes.

        Args:
            store, ranks, device: see `Welcome`.
            reported: the ranks that have reported, for the error.

        Raises:
            EngineDead: some nodes did not register in time.
        """
        nodes, links = self._nodes, dict[int, Link]()
        deadline = time.monotonic() + nodes.seconds
        welcome = Welcome(store, ranks, device)
        with self._listener:
            while len(links) < nodes.count - 1:
                self._listener.settimeout(max(0.01, deadline - time.monotonic()))
                try:
                    connection, (host, *_) = self._listener.accept()
                except TimeoutError:
                    self._missing(links, reported())
                try:
                    node = self._welcome(connection, welcome, links)
                except (OSError, WireError) as error:
                    log.warning("a connection of %s was refused: %s", host, error)
                    connection.close()
                    continue
                links[node] = Link(node, connection, nodes.secret)
        return list(links.values())

    def _missing(self, links: dict[int, Link], reported: str) -> None:
        absent = [node for node in range(1, self._nodes.count) if node not in links]
        for link in links.values():
            link.close()
        here = self._nodes
        names = ", ".join(map(str, absent))
        raise EngineDead(
            f"{f'node {names} has' if len(absent) == 1 else f'nodes {names} have'} not reported "
            f"in {here.seconds:.0f} s; the others: {reported}",
            f"Start them with --nnodes {here.count} --node-rank {absent[0]} and the same "
            f"--dist-init-addr, and let them reach {here.host}",
        )

    def _welcome(self, connection: socket.socket, welcome: Welcome, links: dict[int, Link]) -> int:
        """Index of the node that has registered. Raises WireError if it is refused."""
        nodes = self._nodes
        connection.settimeout(SILENCE_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        challenge = Challenge(secrets.token_bytes(16))
        send_frame(connection, challenge, b"")
        try:
            hello = receive_frame(connection, Hello, nodes.secret)
        except WireError as error:
            # Signed with the empty secret, so that a node with a wrong secret can read the reason.
            send_frame(connection, Welcome(0, 0, "", "the secrets differ"), b"")
            raise error
        refused = None
        if hello.nonce != challenge.nonce:
            refused = "its Hello is of another connection"
        elif hello.versions != VERSIONS:
            refused = f"node 0 runs {VERSIONS}, node {hello.node} {hello.versions}"
        elif hello.nodes != nodes.count or not 0 < hello.node < nodes.count:
            refused = f"it is node {hello.node} of {hello.nodes}, here are {nodes.count}"
        elif hello.node in links:
            refused = f"node {hello.node} is there already"
        answer = welcome if refused is None else msgspec.structs.replace(welcome, refused=refused)
        send_frame(connection, answer, b"")
        if refused is not None:
            raise WireError("refused", refused)
        return hello.node


def join(nodes: Nodes) -> tuple[socket.socket, Welcome]:
    """Register at node 0, which may start later than this node.

    Raises:
        EngineDead: it cannot be reached in time, or refuses this node.
    """
    deadline, port = time.monotonic() + nodes.seconds, nodes.port
    if nodes.launched:
        port = int(torchrun_store(nodes).get(ORDERS))
    while True:
        try:
            connection = socket.create_connection((nodes.host, port), timeout=BEAT_SECONDS)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise EngineDead(
                    f"node 0 cannot be reached at {nodes.host}:{port}: {error}",
                    "Start it, and check --dist-init-addr",
                ) from None
            time.sleep(0.1)
    # The port may be bound before node 0's engine runs, which answers.
    connection.settimeout(nodes.seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        challenge = receive_frame(connection, Challenge, b"")
        hello = Hello(challenge.nonce, VERSIONS, nodes.number, nodes.count)
        send_frame(connection, hello, nodes.secret)
        welcome = receive_frame(connection, Welcome, b"")
    except (OSError, WireError) as error:
        raise EngineDead(f"node 0 at {nodes.host}:{port} does not answer: {error}") from None
    if welcome.refused is not None:
        raise EngineDead(f"node 0 refuses this node: {welcome.refused}")
    return connection, welcome


def torchrun_store(nodes: Nodes) -> Any:
    """The store of torchrun's agent, as a client."""
    from datetime import timedelta

    kept: Any = torch.distributed
    return kept.TCPStore(
        nodes.host, nodes.port, is_master=False, timeout=timedelta(seconds=nodes.seconds)
    )
