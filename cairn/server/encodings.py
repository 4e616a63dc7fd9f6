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
    """The first `size` decompressed bytes of a zlib stream, or of a raw deflate stream, which some
    clients send instead."""
    try:
        return _inflated(zlib.decompressobj(), body, size)
    except zlib.error:
        return _inflated(zlib.decompressobj(-zlib.MAX_WBITS), body, size)


def _inflated(stream: zlib._Decompress, body: bytes, size: int) -> bytes:
    found = stream.decompress(body, size)
    if len(found) < size and not stream.eof:
        raise EOFError("the stream is truncated")
    if stream.unused_data:
        raise ValueError("there is data after the end of the stream")
    return found


DECODERS: dict[str, Decode] = {"gzip": _gunzip, "x-gzip": _gunzip, "deflate": _inflate}
ACCEPTED = "gzip, deflate"


def decoders(header: str) -> list[tuple[str, Decode]]:
    """The decoders of a Content-Encoding header, in the order of decoding.

    Raises:
        HTTPException: 415 for an encoding other than gzip and deflate.
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
    """Decompress a request body.

    Raises:
        HTTPException: 400 if the body does not match its Content-Encoding; 413 if it decompresses
            to more than `limit` bytes.
    """
    for name, decode in steps:
        try:
            body = decode(body, limit + 1)
        except (OSError, EOFError, ValueError, zlib.error) as error:
            detail = (
                f"the Content-Encoding is {name}, but the request body cannot be decoded: {error}"
            )
            raise HTTPException(400, detail) from None
        if len(body) > limit:
            raise HTTPException(
                413, f"the request body has more than {limit} bytes after decompression"
            )
    return body
