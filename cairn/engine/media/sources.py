"""Where the bytes of an image come from: data URLs, files and hosts that the operator allows."""

from __future__ import annotations

import base64
import binascii
import urllib.error
import urllib.parse
import urllib.request
from http.client import HTTPMessage
from pathlib import Path
from reprlib import repr as short
from typing import IO

from cairn.errors import BadRequest
from cairn.specs.media import MediaLimits

LONGEST = 64 << 20
"""Most bytes of a file or of a response."""
FETCH_SECONDS = 10.0
FRAMES = "video/jpeg"
"""Media type of a data URL with the frames of a video, in base64 with commas between them."""


def read_url(url: str, limits: MediaLimits) -> list[bytes]:
    """The file that a URL names; of a video its frames.

    A remote one is fetched here, which may take FETCH_SECONDS.

    Raises:
        BadRequest: for a string that is not a URL, a URL that is not allowed, or one that cannot be
            read.
    """
    scheme = url.partition(":")[0].lower()
    if scheme == "data":
        return _data(url)
    if scheme == "file":
        return [_file(url, limits.folder)]
    if scheme in ("http", "https"):
        return [_remote(url, limits.domains)]
    raise BadRequest(
        f"the URL {short(url)} is neither a data: URL nor one of file:, http: and https:",
        "Send the image as data:image/png;base64,...",
    )


def _data(url: str) -> list[bytes]:
    head, comma, body = url.partition(",")
    kind, *parameters = head[len("data:") :].lower().split(";")
    if not comma or "base64" not in parameters:
        raise BadRequest(
            f"the data URL begins with {short(head)}", "Write data:image/png;base64,..."
        )
    if kind and not kind.startswith("image/") and kind != FRAMES:
        raise BadRequest(f"the data URL holds {short(kind)}, not an image", "Send an image")
    parts = body.split(",") if kind == FRAMES else [body]
    try:
        return [base64.b64decode(part, validate=True) for part in parts]
    except (binascii.Error, ValueError):
        raise BadRequest(
            "the data URL is not base64", "Encode the file's bytes, without line breaks"
        ) from None


def _file(url: str, folder: str | None) -> bytes:
    if folder is None:
        raise BadRequest(
            "file: URLs are not allowed here",
            "Send a data: URL, or start the server with --allowed-local-media-path FOLDER",
        )
    parts = urllib.parse.urlsplit(url)
    path = Path(urllib.parse.unquote(parts.path)).resolve()
    if parts.netloc not in ("", "localhost") or not path.is_relative_to(Path(folder).resolve()):
        raise BadRequest(
            f"{short(url)} is not in the folder that is allowed", "Use a file of that folder"
        )
    try:
        with path.open("rb") as file:
            data = file.read(LONGEST + 1)
    except OSError as error:
        raise BadRequest(f"{short(url)} cannot be read: {error.strerror}") from None
    return _bounded(data, url)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects only to allowed hosts."""

    def __init__(self, domains: tuple[str, ...]) -> None:
        self._domains = domains

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        _check_host(newurl, self._domains)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _check_host(url: str, domains: tuple[str, ...]) -> None:
    parts = urllib.parse.urlsplit(url)
    host = (parts.hostname or "").lower()
    if parts.scheme.lower() not in ("http", "https") or host not in domains:
        raise BadRequest(
            f"remote URLs of {short(host)} are not allowed here",
            "Send a data: URL, or start the server with --allowed-media-domains HOST",
        )


def _remote(url: str, domains: tuple[str, ...]) -> bytes:
    _check_host(url, domains)
    opener = urllib.request.build_opener(_Redirects(domains))
    try:
        with opener.open(url, timeout=FETCH_SECONDS) as answer:
            return _bounded(answer.read(LONGEST + 1), url)
    except (OSError, ValueError, urllib.error.URLError) as error:
        raise BadRequest(f"{short(url)} cannot be fetched: {str(error)[:200]}") from None


def _bounded(data: bytes, url: str) -> bytes:
    if len(data) > LONGEST:
        raise BadRequest(f"{short(url)} has more than {LONGEST} bytes", "Use a smaller file")
    return data
