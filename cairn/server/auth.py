"""API keys: required by every route except the two for load balancers' health checks."""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from cairn.server import page

OPEN_PATHS = frozenset({"/health", "/ready"})
"""Routes without a key: /health and /ready."""
PAGE_PATHS = frozenset(route.path for route in page.routes)
"""The page and its files. A browser cannot send a bearer key with an address: for these routes it
prompts for user and password, and the password is the key."""


def check_key(path: str, headers: Headers, keys: Sequence[str]) -> None:
    """Accept or refuse a request.

    Every configured key is compared, each in constant time: how long it takes tells neither how
    much of a key was right nor which one.

    Args:
        path: of the request.
        headers: of the request; the key stands in `Authorization: Bearer KEY`, or is the password
            of `Authorization: Basic`, as browsers send it after they asked for one, or stands in
            `X-Api-Key`, as Anthropic's clients send it.
        keys: those that are accepted; none: everybody is.

    Raises:
        HTTPException: 401, the key is missing or wrong.
    """
    if not keys or path in OPEN_PATHS:
        return
    given = _given(headers.get("authorization", "")) or headers.get("x-api-key", "").encode()
    if not given:
        raise _refused(path, "this server asks for an API key: send Authorization: Bearer KEY")
    matches = [hmac.compare_digest(given, key.encode()) for key in keys]
    if not any(matches):
        raise _refused(path, "the API key is not one of this server's")


def _given(header: str) -> bytes:
    """The key that the header carries, empty for none."""
    scheme, _, value = header.partition(" ")
    value = value.strip()
    if scheme.lower() == "bearer":
        return value.encode("utf-8", "surrogateescape")
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return b""
    return b""


def _refused(path: str, detail: str) -> HTTPException:
    scheme = 'Basic realm="cairn: the password is the API key"' if path in PAGE_PATHS else "Bearer"
    return HTTPException(401, detail, {"WWW-Authenticate": scheme})
