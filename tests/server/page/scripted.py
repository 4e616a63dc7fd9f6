"""A server with the API's protocol and scripted responses, for tests of the page."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from cairn.server import page

LANDMARKS = {
    "page_size": 64,
    "landmarks": True,
    "landmark_layers": [0, 2],
    "landmark_window": 256,
    "max_selection_tokens": 4096,
    "chat_template": True,
}
DENSE = {**LANDMARKS, "landmarks": False, "landmark_layers": [], "landmark_window": 0}


@dataclass
class Script:
    """The server's next actions, and the requests that it received.

    Attributes:
        facts: of the model; a token is a character.
        max_model_len: of the model.
        key: API key that it wants, None: none.
        pieces: what an answer consists of, a token each; None: the value of the key asked for.
        reads: per token a list of layers; None: page 1 in every layer.
        failure: (status, body) of the next generation.
        breaks: an error event (or, "", the end of the connection) instead of the end.
        comments: sent before the pieces.
        hold: the piece number `hold_at` waits for this.
        loading: answers of 503 before the server is ready.
        asked: bodies of generations, with their paths under "path".
        gone: set when a client has left in the middle.
    """

    facts: dict[str, Any] = field(default_factory=lambda: dict(LANDMARKS))
    max_model_len: int = 131_072
    key: str | None = None
    pieces: list[str] | None = None
    reads: list[list[dict[str, Any]]] | None = None
    failure: tuple[int, dict[str, Any]] | None = None
    breaks: str | None = None
    comments: list[str] = field(default_factory=list)
    hold: threading.Event = field(default_factory=threading.Event)
    hold_at: int = 1
    loading: int = 0
    asked: list[dict[str, Any]] = field(default_factory=list)
    detokenized: list[list[int]] = field(default_factory=list)
    gone: threading.Event = field(default_factory=threading.Event)


def error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "code": None}}, status)


def text_of(body: dict[str, Any]) -> str:
    if "prompt" in body:
        return str(body["prompt"])
    return "".join(f"{m['role']}: {m['content']}\n" for m in body["messages"])


def read_by(pages: list[int], weights: list[float], window: float = 0.3) -> list[dict[str, Any]]:
    """The same selection in every layer."""
    return [
        {"layer": layer, "pages": pages, "weights": weights, "window": window}
        for layer in LANDMARKS["landmark_layers"]
    ]


class Scripted:
    """The application; its `script` may be changed at any time."""

    def __init__(self) -> None:
        self.script = Script()
        routes = [
            Route("/v1/models", self.models),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/v1/completions", self.generate, methods=["POST"]),
            Route("/v1/chat/completions", self.generate, methods=["POST"]),
        ]
        self.app = Starlette(routes=[*routes, *page.routes])

    def refused(self, request: Request) -> Response | None:
        script = self.script
        if script.loading:
            script.loading -= 1
            return error(503, "the model is loading")
        given = request.headers.get("authorization")
        if script.key is not None and given != f"Bearer {script.key}":
            return error(401, "this server asks for an API key")
        return None

    async def models(self, request: Request) -> Response:
        card = {
            "id": "tiny",
            "max_model_len": self.script.max_model_len,
            "cairn": self.script.facts,
        }
        return self.refused(request) or JSONResponse({"data": [card]})

    async def tokenize(self, request: Request) -> Response:
        tokens = [ord(c) for c in text_of(await request.json())]
        return self.refused(request) or JSONResponse({"count": len(tokens), "tokens": tokens})

    async def detokenize(self, request: Request) -> Response:
        tokens = (await request.json())["tokens"]
        self.script.detokenized.append(tokens)
        return self.refused(request) or JSONResponse({"prompt": "".join(map(chr, tokens))})

    async def generate(self, request: Request) -> Response:
        if refusal := self.refused(request):
            return refusal
        body = await request.json()
        script = self.script
        script.asked.append({**body, "path": request.url.path})
        if script.failure is not None:
            status, answer = script.failure
            script.failure = None
            return JSONResponse(answer, status, headers={"Retry-After": "7"})
        return StreamingResponse(self.events(body), media_type="text/event-stream")

    async def events(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        script, chat = self.script, "messages" in body
        pieces = answer_to(body) if script.pieces is None else script.pieces
        if chat:
            yield event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for comment in script.comments:
            yield f": {comment}\n\n".encode()
        try:
            for i, piece in enumerate(pieces):
                while i == script.hold_at and not script.hold.is_set():
                    await asyncio.sleep(0.01)
                choice: dict[str, Any] = {"index": 0, "finish_reason": None}
                choice |= {"delta": {"content": piece}} if chat else {"text": piece}
                if body.get("cairn", {}).get("selection"):
                    reads = read_by([1], [0.5]) if script.reads is None else script.reads[i]
                    choice["cairn"] = {"selection": [reads]}
                yield event({"choices": [choice]})
                await asyncio.sleep(0.002)
        except asyncio.CancelledError:
            script.gone.set()
            raise
        if script.breaks is not None:
            if script.breaks:
                yield event({"error": {"message": script.breaks, "code": None}})
            return
        last: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
        yield event({"choices": [{"index": 0, "finish_reason": "length", **last}]})
        usage = {
            "prompt_tokens": len(text_of(body)),
            "completion_tokens": len(pieces),
            "prompt_tokens_details": {"cached_tokens": 63},
        }
        yield event({"choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"


def event(body: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n".encode()


def answer_to(body: dict[str, Any]) -> list[str]:
    """The value of the requested key in the prompt, one digit per token."""
    prompt = text_of(body)
    asked = re.search(r"#ask (\w+)=$", prompt)
    found = asked and re.search(rf"^#key {asked[1]}=(\d+)$", prompt, re.MULTILINE)
    return list(found[1]) if found else ["?"]


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """Run an application in a thread on a free port; yields its address."""
    config = uvicorn.Config(app, port=0, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        server.force_exit = True
        thread.join(5)
