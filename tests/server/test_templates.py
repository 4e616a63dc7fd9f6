"""The template renderer with hostile templates: real worker processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cairn.engine.chat_template import TemplateInput
from cairn.engine.tokenizer import Tokenizer
from cairn.errors import BadModel, BadRequest, Busy, CairnError
from cairn.server.templates import TemplateRenderer
from tests.server.conftest import model_with_template
from tests.server.fake_api import FakeApi, chat_body
from tests.server.raw import Raw
from tests.server.running import worker_pids

PATH = "/v1/chat/completions"
GOOD = "{% for message in messages %}{{ message.role }}: {{ message.content }}{% endfor %}"
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
POWER = "{% set n = 9 %}{{ n ** (n ** n) % 7 }}"
RECURSION = (
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
)
DOUBLING = (
    "{% set n = namespace(s='x' * 1000) %}"
    "{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}"
)
LONG = "{{ 'x' * (messages[0].content | int) }}"


def given(template: str = GOOD, content: Any = "hi", **more: Any) -> TemplateInput:
    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": content}],
        "tools": None,
        "variables": {},
        "add_generation_prompt": True,
        "continue_final_message": False,
    }
    return TemplateInput(template=template, **{**fields, **more})


def rendered(renderer: TemplateRenderer, *arguments: Any, **more: Any) -> str:
    return asyncio.run(renderer.render(given(*arguments, **more)))


@pytest.fixture
def renderers() -> Iterator[Callable[..., TemplateRenderer]]:
    """Creates renderers and closes them at the end."""
    made: list[TemplateRenderer] = []

    def make(**options: Any) -> TemplateRenderer:
        made.append(TemplateRenderer(**options))
        return made[-1]

    yield make
    for renderer in made:
        renderer.close()


@pytest.fixture(scope="module")
def renderer() -> Iterator[TemplateRenderer]:
    renderer = TemplateRenderer(seconds=2)
    asyncio.run(renderer.open())
    yield renderer
    renderer.close()


def test_a_conversation_is_rendered(renderer: TemplateRenderer) -> None:
    assert rendered(renderer) == "user: hi"
    assert rendered(renderer, "{{ bos_token }}{{ x }}", variables={"bos_token": "<s>", "x": 2}) == (
        "<s>2"
    )
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert json.loads(rendered(renderer, "{{ tools | tojson }}", tools=tools)) == tools
    long = "\u00e9\U0001f418" * 500_000
    assert rendered(renderer, content=long) == f"user: {long}"


@pytest.mark.parametrize("content", ["\udc00", 10**60, [float("inf")], {"a": {"b": None}}])
def test_any_json_value_reaches_the_template(renderer: TemplateRenderer, content: Any) -> None:
    assert rendered(renderer, "{{ messages[0].content }}", content) == str(content)


def test_refusals_are_those_of_the_template(renderer: TemplateRenderer) -> None:
    with pytest.raises(BadRequest, match="refuses the messages: no thanks"):
        rendered(renderer, "{{ raise_exception('no thanks') }}")
    with pytest.raises(BadModel, match="chat template is broken"):
        rendered(renderer, "{% if %}")
    with pytest.raises(BadRequest, match="refuses the messages"):
        rendered(renderer, "{{ ''.__class__.__mro__[1].__subclasses__() }}")


@pytest.mark.parametrize(
    "template",
    [
        pytest.param(LOOP, id="loop", marks=pytest.mark.slow),
        pytest.param(POWER, id="power"),
        pytest.param(RECURSION, id="recursion", marks=pytest.mark.slow),
    ],
)
def test_a_template_without_an_end_is_ended_and_the_next_goes_on(
    renderer: TemplateRenderer, template: str
) -> None:
    with pytest.raises(BadRequest, match="more than 2 seconds.*correct the template"):
        rendered(renderer, template)
    assert rendered(renderer) == "user: hi"
    assert len(worker_pids("template_worker")) <= 2


@pytest.mark.parametrize("template", [DOUBLING, "{{ 'x' * 10 ** 12 }}"])
def test_memory_is_bounded(renderer: TemplateRenderer, template: str) -> None:
    with pytest.raises(BadRequest, match="MemoryError|too much memory|more than 2 seconds"):
        rendered(renderer, template)
    assert rendered(renderer) == "user: hi"


def test_a_text_that_is_far_longer_than_its_messages_is_refused(renderer: TemplateRenderer) -> None:
    assert len(rendered(renderer, LONG, "1000000")) == 1_000_000
    with pytest.raises(BadRequest, match="makes 100000000 characters"):
        rendered(renderer, LONG, "100000000")


def test_a_worker_that_cannot_start_says_why(renderers: Callable[..., TemplateRenderer]) -> None:
    with pytest.raises(CairnError, match="template_worker cannot be started.*10485760 bytes"):
        asyncio.run(renderers(memory=10 << 20).open())


def test_opening_starts_a_worker_which_is_replaced_when_it_was_killed(
    renderers: Callable[..., TemplateRenderer],
) -> None:
    before = worker_pids("template_worker")
    renderer = renderers(workers=1)
    asyncio.run(renderer.open())
    (first,) = worker_pids("template_worker") - before
    assert rendered(renderer) == "user: hi"
    os.kill(first, signal.SIGKILL)
    assert rendered(renderer) == "user: hi"
    renderer.close()
    assert worker_pids("template_worker") == before


def test_too_many_at_once_are_told_to_come_back(
    renderers: Callable[..., TemplateRenderer],
) -> None:
    renderer = renderers(workers=1, max_waiting=3)

    async def crowd() -> list[Any]:
        return await asyncio.gather(
            *(renderer.render(given()) for _ in range(5)), return_exceptions=True
        )

    results = asyncio.run(crowd())
    assert results[:3] == ["user: hi"] * 3
    assert all(isinstance(result, Busy) and result.retry_after >= 1 for result in results[3:])


def test_modules_of_the_working_directory_are_not_run(
    renderers: Callable[..., TemplateRenderer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("jinja2", "numpy", "resource"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    assert rendered(renderers()) == "user: hi"
    assert not (tmp_path / "ran").exists()


def test_other_requests_go_on_beside_a_template_without_an_end(
    renderers: Callable[..., TemplateRenderer], tmp_path: Path
) -> None:
    renderer = renderers(seconds=2)
    template = "{% if messages[0].content == 'stop' %}" + POWER + "{% endif %}" + GOOD
    api = FakeApi(Tokenizer(model_with_template(tmp_path / "m", template)))
    api.state.templates = renderer

    async def run() -> Raw:
        # Both workers are running.
        await asyncio.gather(renderer.render(given()), renderer.render(given()))
        endless = Raw(PATH, chat_body("stop", max_tokens=2))
        task = endless.start(api.app)
        for path, body in 4 * [(PATH, chat_body(max_tokens=2)), ("/tokenize", {"prompt": "hi"})]:
            other = Raw(path, body)
            await other.start(api.app)
            assert other.status == 200 and not task.done()
        await task
        return endless

    endless = asyncio.run(run())
    assert endless.status == 400 and "chat template takes more than 2 seconds" in endless.text
    assert json.loads(endless.text)["error"]["param"] == "messages"
    assert len(api.client.submitted) == 4
