"""The chat page at `/`, which also shows the pages of the context that each token read.

It consists of static files, which call the public API like any other client.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}

# No external and no inline scripts, so that the model's output cannot run as code.
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'; object-src 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # The browser revalidates every time (304 if unchanged), so an upgraded server shows its new
    # page.
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """A file of the page.

    Attributes:
        body: its content.
        media_type: media type, by its extension.
        etag: quoted hash of the content.
    """

    body: bytes
    media_type: str
    etag: str

    def response(self, request: Request) -> Response:
        """The file, or 304 if the browser's copy is current."""
        headers = HEADERS | {"ETag": self.etag}
        if request.headers.get("if-none-match") == self.etag:
            return Response(status_code=304, headers=headers)
        return Response(self.body, media_type=self.media_type, headers=headers)


def _load() -> dict[str, Asset]:
    assets = {}
    for file in resources.files(__name__).iterdir():
        media_type = MEDIA_TYPES.get(file.name.rpartition(".")[2])
        if media_type is not None:
            body = file.read_bytes()
            etag = f'"{hashlib.sha256(body).hexdigest()[:24]}"'
            assets[file.name] = Asset(body, media_type, etag)
    return assets


ASSETS = _load()


def _route(path: str, asset: Asset) -> Route:
    async def serve(request: Request) -> Response:
        return asset.response(request)

    return Route(path, serve, methods=["GET"])


# One route per file makes path traversal impossible.
routes: list[Route] = [
    _route("/", ASSETS["index.html"]),
    *(_route(f"/page/{name}", asset) for name, asset in ASSETS.items() if name != "index.html"),
]
