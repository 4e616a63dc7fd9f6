"""One HTTP request to an ASGI application, step by step: the client may disconnect at any time."""

import asyncio
import json


class Raw:
    """A POST request with JSON. Run `app` with it in a task; `sent` collects the response."""

    def __init__(self, path, body):
        self.sent = []
        self._body = json.dumps(body).encode()
        self._given = False
        self._left = asyncio.Event()
        self._news = asyncio.Event()
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "client": ("test", 1),
            "server": ("test", 80),
            "scheme": "http",
        }

    def start(self, app):
        """The task that runs the application."""
        return asyncio.create_task(app(self.scope, self.receive, self.send))

    async def receive(self):
        if not self._given:
            self._given = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        self.sent.append(message)
        self._news.set()

    def leave(self):
        self._left.set()

    async def until(self, text):
        """Wait until the response contains the text."""
        while text not in self.text:
            self._news.clear()
            await asyncio.wait_for(self._news.wait(), 10)

    @property
    def status(self):
        return self.sent[0]["status"] if self.sent else None

    @property
    def text(self):
        return b"".join(message.get("body", b"") for message in self.sent).decode()
