"""API keys: required by every route except /health and /ready."""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from cairn.server import page

OPEN_PATHS = frozenset({"/health", "/ready"})
"""Routes that need no API key, because load balancers call them."""
PAGE_PATHS = frozenset(route.path for route in page.routes)
"""The chat page and its files. A browser that opens a URL sends no bearer token, so these routes
ask for Basic authentication, with the API key as password."""


def check_key(path: str, headers: Headers, keys: Sequence[str]) -> None:
    """Check the API key of a request.

    All configured keys are compared, each in constant time, so that the response time reveals
    nothing about them.

    Args:
        path: path of the request.
        headers: headers of the request. The key is read from `Authorization: Bearer KEY`, from the
            password of `Authorization: Basic` (browsers), or from `X-Api-Key` (Anthropic clients).
        keys: accepted keys; empty accepts every request.

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
    """The key in an Authorization header, or empty bytes."""
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
