"""The whole API application with a FakeClient, called in this process."""

from __future__ import annotations

import asyncio
import json

import httpx

from cairn.engine.chat_template import render
from cairn.engine.media.reader import MediaReader
from cairn.errors import BadRequest
from cairn.obs.metrics import Metrics
from cairn.server.app import create_app
from cairn.server.media import MediaPreparer
from cairn.server.options import ServerOptions
from cairn.server.state import ServerState
from cairn.specs.media import MediaLimits
from tests.server.fake_client import VOCAB, FakeClient

MODEL = "tiny"


class FakeGrammars:
    """Accepts every grammar except those whose text contains "bomb"."""

    def __init__(self):
        self.checked = []

    async def check(self, grammar):
        self.checked.append(grammar)
        if "bomb" in grammar.text:
            raise BadRequest("the grammar is too large")


class FakeTemplates:
    """Renders templates in this process."""

    async def render(self, given):
        return render(given)


class FakeApi:
    """Sends requests to the application, each in its own event loop."""

    def __init__(self, tokenizer, media=None, limits=None, **options):
        self.client = FakeClient(tokenizer, vocab=VOCAB if media is None else tokenizer.size)
        self.grammars = FakeGrammars()
        self.state = ServerState(
            options=ServerOptions(**options),
            client=self.client,
            metrics=Metrics(MODEL, tuple),
            grammars=self.grammars,
            templates=FakeTemplates(),
            model_name=MODEL,
            tokenizer=tokenizer,
            media=MediaPreparer(
                MediaReader(media, limits or MediaLimits(), tokenizer), self.client.max_model_len
            ),
            loaded=True,
        )
        self.app = create_app(self.state)

    def reply_with(self, text):
        """Set the model's output of all later requests."""
        self.client.answer = lambda *_: text.encode()

    @property
    def asked(self):
        """The engine's last request."""
        return self.client.submitted[-1]

    def request(self, method, path, **arguments):
        async def run():
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
                return await http.request(method, path, **arguments)

        return asyncio.run(run())

    def post(self, path, body):
        return self.request("POST", path, json=body)

    def answer(self, path, body):
        """The body of a successful response."""
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        return response.json()

    def error(self, path, body, status=400):
        """The error of a failed request."""
        response = self.post(path, body)
        assert response.status_code == status, response.text
        return response.json()["error"]

    def events(self, path, body):
        """Events of a stream, without the final [DONE], which is checked."""
        response = self.post(path, body | {"stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        *events, done = events_of(response.text)
        assert done == "[DONE]"
        return events

    def chat(self, content="hi", **fields):
        return self.answer("/v1/chat/completions", chat_body(content, **fields))

    def complete(self, prompt="hi", **fields):
        return self.answer("/v1/completions", {"prompt": prompt, **fields})


def chat_body(content="hi", **fields):
    return {"messages": [{"role": "user", "content": content}], **fields}


def events_of(text):
    """Parsed events of a stream, without comments."""
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    assert all(block.startswith("data: ") for block in blocks), blocks
    datas = [block.removeprefix("data: ") for block in blocks]
    return [data if data == "[DONE]" else json.loads(data) for data in datas]
