"""The transfer protocol between two engines: a request frame, an answer frame, then the records.

A frame is its length, a keyed hash of its body, and the body in MessagePack. The hash is blake2b's
with the secret as its key. Records follow the answer one after the other as they are, in the order
in which they were asked for; the answer has a checksum for each of them. Records that the peer
reads itself are acknowledged: it sends a byte when it has read them, which comes back if they were
held until then.
"""

from __future__ import annotations

import hmac
import socket
from hashlib import blake2b
from typing import TypeVar

import msgspec

VERSION = 5
HASH_BYTES = 16
LONGEST_FRAME = 64 << 20
T = TypeVar("T")


class WireError(Exception):
    """An invalid frame.

    Args:
        reason: one word, for a metric.
        message: for the log.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """Request for the records of a ticket, which is used up by the answer.

    Attributes:
        version: protocol version.
        model: key of the requester's `Identity`.
        ticket: name of the ticket.
        wanted: for each kind of record the names, concatenated.
        reads: backend of the agent through which records are read, if the other side has the same,
            instead of being sent; empty: none.
    """

    version: int
    model: bytes
    ticket: bytes
    wanted: list[tuple[int, bytes]]
    reads: str = ""


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """Answer to an Ask. Without `agent`, the records follow; otherwise they are read through it,
    and the ticket is valid until the connection ends.

    Attributes:
        sums: checksum of each requested record; None: not available. Records in GPU memory have
            none.
        refused: why the request is refused: "ticket", "model", "version" or "backend".
        model: text of the answering engine's `Identity` where that is why; else empty.
        agent: metadata of its agent (`cairn.engine.transfer.agent`); empty: records follow.
        addresses: with an agent the address of each requested record, little-endian int64; -1: not
            available.
    """

    sums: list[int | None]
    refused: str | None = None
    model: str = ""
    agent: bytes = b""
    addresses: bytes = b""


def send_frame(connection: socket.socket, message: msgspec.Struct, secret: bytes) -> None:
    """Send one frame."""
    body = msgspec.msgpack.encode(message)
    connection.sendall(len(body).to_bytes(4, "little") + _sign(body, secret) + body)


def receive_frame(connection: socket.socket, kind: type[T], secret: bytes) -> T:
    """Receive one frame.

    Raises:
        WireError: it was signed with another secret, or is malformed.
        OSError: the connection broke.
    """
    head = bytearray(4 + HASH_BYTES)
    receive_into(connection, memoryview(head))
    length = int.from_bytes(head[:4], "little")
    if length > LONGEST_FRAME:
        raise WireError("protocol", f"a frame has {length} bytes")
    body = bytearray(length)
    receive_into(connection, memoryview(body))
    if not hmac.compare_digest(head[4:], _sign(body, secret)):
        raise WireError("secret", "a frame was made with another secret")
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise WireError("protocol", f"a frame cannot be read: {error}") from None


def receive_into(connection: socket.socket, view: memoryview) -> None:
    """Fill a buffer. Raises OSError when the connection breaks."""
    while view:
        count = connection.recv_into(view)
        if count == 0:
            raise ConnectionResetError("the connection ended")
        view = view[count:]


def _sign(body: bytes | bytearray, secret: bytes) -> bytes:
    # A key has 64 bytes at most; a secret may be longer.
    key = blake2b(secret).digest() if secret else b""
    return blake2b(body, key=key, digest_size=HASH_BYTES).digest()
