import asyncio
import re

import pytest
from aiohttp import web

from cairn.eval.subject import Source
from tests.bench.fake_api import FakeApi, tokens_of


class KnowingApi(FakeApi):
    """A server that answers `#ask abcd=` from `#key abcd=12345`, and returns three of the magic
    numbers of a text; to other prompts it answers "word"."""

    async def _answer(self, request, body):
        chat = "messages" in body
        prompt = body["messages"][0]["content"] if chat else body["prompt"]
        asked = re.search(r"#ask (\w+)=$", prompt)
        found = re.search(rf"#key {asked[1]}=(\d+)", prompt) if asked else None
        text = found[1] if found else "word"
        if prompt.endswith("in the provided text are"):
            text = " ".join(re.findall(r"is: (\d+)\.", prompt)[:3])
        await asyncio.sleep(0.02)
        choice = {"message": {"content": text}} if chat else {"text": text}
        usage = {"prompt_tokens": tokens_of(prompt), "completion_tokens": 2}
        return web.json_response({"choices": [choice], "usage": usage})


@pytest.fixture
def api():
    with KnowingApi() as api:
        yield api


@pytest.fixture
def served(api):
    """The server as a source of subjects."""
    from cairn.bench.serve.client import ServerAddress
    from cairn.config import default_model_path

    return Source(default_model_path(), {}, ServerAddress(api.url))


@pytest.fixture
def local():
    """The embedded model as a source of subjects."""
    from cairn.config import default_model_path

    return Source(default_model_path(), {"kv_cache_memory": "16MiB", "device": "cpu"})
