"""A scripted OpenAI-compatible server: a token is four characters; delays and failures are
settings."""

import asyncio
import json
import threading
from dataclasses import dataclass, field

from aiohttp import web

CHARS = 4
PIECE = "word"


def tokens_of(text):
    return -(-len(text) // CHARS)


@dataclass
class FakeApi:
    """Use it as a context manager; `url` is where it listens.

    `status` maps the number of a generation request to an HTTP status; `ending` is what comes
    instead of [DONE]. While a prompt of more than `long` tokens is read, the others' tokens take
    `stalled` seconds; the first such prompt takes `first_long` seconds more.
    """

    tokenize: bool = True
    usage: bool = True
    models: tuple = ("fake-model",)
    key: str | None = None
    prefill: float = 0.0
    pace: float = 0.001
    stalled: float = 0.0
    long: int = 1 << 30
    first_long: float = 0.0
    eos_after: int | None = None
    status: dict = field(default_factory=dict)
    ending: str | None = None
    leaked: int | None = None
    bodies: list = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    cut_off: int = 0
    loading: int = 0
    tokenized: int = 0

    def __enter__(self):
        started = threading.Event()
        self._loop = asyncio.new_event_loop()

        def serve():
            asyncio.set_event_loop(self._loop)
            self._loop.run_until_complete(self._start())
            started.set()
            self._loop.run_forever()
            self._loop.run_until_complete(self._runner.cleanup())
            self._loop.close()

        self._thread = threading.Thread(target=serve)
        self._thread.start()
        assert started.wait(20)
        return self

    def __exit__(self, *error):
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)

    async def _start(self):
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/chat/completions", self._generate)
        if self.tokenize:
            app.router.add_post("/tokenize", self._tokenize)
        if self.leaked is not None:
            app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _models(self, request):
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "no key"}}, status=401)
        return web.json_response({"data": [{"id": name} for name in self.models]})

    async def _tokenize(self, request):
        self.tokenized += 1
        return web.json_response({"count": tokens_of((await request.json())["prompt"])})

    async def _metrics(self, request):
        value = f'cairn:leaked_pages{{model_name="fake"}} {self.leaked}'
        return web.Response(text=f"# HELP cairn:leaked_pages x\n{value}\ncairn:other 3\n")

    async def _generate(self, request):
        body = await request.json()
        number = len(self.bodies)
        self.bodies.append(body)
        if number in self.status:
            error = {"error": {"message": f"refused {number}", "code": None}}
            return web.json_response(error, status=self.status[number])
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self._answer(request, body)
        except asyncio.CancelledError:
            self.cut_off += 1
            raise
        except ConnectionResetError:
            self.cut_off += 1
            return web.Response()
        finally:
            self.running -= 1

    async def _answer(self, request, body):
        chat = "messages" in body
        prompt = body["messages"][0]["content"] if chat else body["prompt"]
        read = tokens_of(prompt)
        count = body["max_tokens"]
        if self.eos_after is not None and not body.get("ignore_eos"):
            count = min(count, self.eos_after)
        usage = {
            "prompt_tokens": read,
            "completion_tokens": count * body.get("n", 1),
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        await self._read(read)
        if not body.get("stream"):
            await asyncio.sleep(count * self.pace)
            choices = [
                {"index": i, "text": PIECE * count, "finish_reason": "stop"}
                for i in range(body.get("n", 1))
            ]
            return web.json_response(
                {"choices": choices} | ({"usage": usage} if self.usage else {})
            )
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def send(data):
            await response.write(f"data: {data}\n\n".encode())

        if chat:
            role = {"role": "assistant", "content": ""}
            await send(json.dumps({"choices": [{"index": 0, "delta": role}]}))
        for i in range(count):
            if i:
                await asyncio.sleep(self.stalled if self.loading and self.stalled else self.pace)
            for index in range(body.get("n", 1)):
                piece = {"delta": {"content": PIECE}} if chat else {"text": PIECE}
                await send(json.dumps({"choices": [{"index": index, **piece}]}))
        end = {"delta": {}} if chat else {"text": ""}
        await send(json.dumps({"choices": [{"index": 0, "finish_reason": "stop", **end}]}))
        if self.usage:
            await send(json.dumps({"choices": [], "usage": usage}))
        await send(self.ending) if self.ending else await send("[DONE]")
        return response

    async def _read(self, tokens):
        self.loading += tokens > self.long
        try:
            extra = 0.0
            if tokens > self.long:
                extra, self.first_long = self.first_long, 0.0
            await asyncio.sleep(tokens * self.prefill + extra)
        finally:
            self.loading -= tokens > self.long
