"""Decompression of request bodies, bounded by the limit on the uncompressed size."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable

from starlette.exceptions import HTTPException

Decode = Callable[[bytes, int], bytes]


def _gunzip(body: bytes, size: int) -> bytes:
    """The first `size` decompressed bytes of a sequence of gzip members."""
    with gzip.GzipFile(fileobj=io.BytesIO(body)) as file:
        return file.read(size)


def _inflate(body: bytes, size: int) -> bytes:
    """The same of a zlib stream, or of a bare deflate stream, which some clients send instead."""
    try:
        return _inflated(zlib.decompressobj(), body, size)
    except zlib.error:
        return _inflated(zlib.decompressobj(-zlib.MAX_WBITS), body, size)


def _inflated(stream: zlib._Decompress, body: bytes, size: int) -> bytes:
    found = stream.decompress(body, size)
    if len(found) < size and not stream.eof:
        raise EOFError("the stream has no end")
    if stream.unused_data:
        raise ValueError("something follows the end of the stream")
    return found


DECODERS: dict[str, Decode] = {"gzip": _gunzip, "x-gzip": _gunzip, "deflate": _inflate}
ACCEPTED = "gzip, deflate"


def decoders(header: str) -> list[tuple[str, Decode]]:
    """How to undo a Content-Encoding, in order.

    Raises:
        HTTPException: 415 for an encoding that this server does not know.
    """
    names = [name.strip().lower() for name in header.split(",")]
    names = [name for name in reversed(names) if name not in ("", "identity")]
    for name in names:
        if name not in DECODERS:
            raise HTTPException(
                415,
                f"the content encoding is {name!r}, use gzip, deflate or none",
                {"Accept-Encoding": ACCEPTED, "Connection": "close"},
            )
    return [(name, DECODERS[name]) for name in names]


def decoded(body: bytes, steps: list[tuple[str, Decode]], limit: int) -> bytes:
    """A decompressed body.

    Raises:
        HTTPException: 400, it is not what its Content-Encoding says; 413, it is longer than `limit`
            bytes.
    """
    for name, decode in steps:
        try:
            body = decode(body, limit + 1)
        except (OSError, EOFError, ValueError, zlib.error) as error:
            detail = f"the request body is said to be {name}, but cannot be decoded: {error}"
            raise HTTPException(400, detail) from None
        if len(body) > limit:
            raise HTTPException(
                413, f"the request body is longer than {limit} bytes once it is decoded"
            )
    return body
