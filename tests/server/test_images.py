"""Images in requests: what the engine gets, and errors."""

from __future__ import annotations

import gc
import http.server
import threading

import httpx
import psutil
import pytest

from cairn.engine.media.pixels import decoded, prepared_image
from cairn.engine.tokenizer import Tokenizer
from cairn.specs.media import MediaLimits
from tests.seeing import (
    END,
    IMAGE,
    START,
    VIDEO,
    bomb,
    data_url,
    file_of,
    media_spec,
    picture,
    question,
    write,
)
from tests.server.fake_api import FakeApi
from tests.server.running import running

CHAT = "/v1/chat/completions"
MEDIA = media_spec()
PNG = file_of(picture(1))
URL = data_url(PNG)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    return Tokenizer(write(tmp_path_factory.mktemp("seeing")))


@pytest.fixture
def api(seeing):
    made = FakeApi(seeing, MEDIA)
    yield made
    made.state.media.close()


def body(*urls, **fields):
    return {"messages": question(*urls), "max_tokens": 2, **fields}


def test_an_image_reaches_the_engine(api):
    wanted = prepared_image(decoded(PNG, 10**6), MEDIA)
    answer = api.answer(CHAT, body(URL))
    asked = api.asked
    assert asked.prompt.count(IMAGE) == wanted.tokens
    assert answer["usage"]["prompt_tokens"] == len(asked.prompt)
    (item,), (span,) = asked.media.items, asked.media.spans
    assert item == wanted.item
    assert asked.prompt[span.first - 1] == START and asked.prompt[span.end] == END
    assert asked.prompt[span.first : span.end] == [IMAGE] * span.tokens
    # A text request has no images, and a message may give the URL as a string.
    api.answer(CHAT, {"messages": [{"role": "user", "content": "hi"}]})
    assert api.asked.media is None
    detailed = body(URL)
    detailed["messages"][0]["content"][0]["image_url"]["detail"] = "low"
    api.answer(CHAT, detailed)
    assert api.asked.prompt == asked.prompt and api.asked.media == asked.media
    parts = [{"type": "image_url", "image_url": URL}]
    api.answer(CHAT, {"messages": [{"role": "user", "content": parts}]})
    assert api.asked.media.items == (item,)


def test_several_images_and_frames_of_a_video(api):
    frames = [file_of(picture(seed), "JPEG") for seed in range(3)]
    joined = data_url(frames[0], "video/jpeg")
    for frame in frames[1:]:
        joined += "," + data_url(frame).partition(",")[2]
    message = question(URL, data_url(file_of(picture(2, 60, 40))))
    message[0]["content"].append({"type": "video_url", "video_url": {"url": joined}})
    api.answer(CHAT, {"messages": message})
    kinds = [api.asked.prompt[span.first] for span in api.asked.media.spans]
    assert kinds == [IMAGE, IMAGE, VIDEO, VIDEO]
    assert api.state.tokenizer.decode(api.asked.prompt).count(" seconds>") == 2


def test_other_apis_and_token_counts(api):
    wanted = prepared_image(decoded(PNG, 10**6), MEDIA).item
    source = {"type": "base64", "media_type": "image/png", "data": URL.partition(",")[2]}
    said = {"role": "user", "content": [{"type": "image", "source": source}]}
    api.answer("/v1/messages", {"messages": [said], "max_tokens": 2})
    assert api.asked.media.items == (wanted,)
    count = api.answer("/v1/messages/count_tokens", {"messages": [said]})
    assert count["input_tokens"] == len(api.asked.prompt)
    parts = [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": "?"}]
    api.answer("/v1/responses", {"input": [{"role": "user", "content": parts}]})
    assert api.asked.media.items == (wanted,)
    tokens = api.answer("/tokenize", {"messages": question(URL)})["tokens"]
    assert tokens.count(IMAGE) == api.asked.prompt.count(IMAGE)


def test_enable_thinking(api):
    def end(**fields):
        api.answer(CHAT, {"messages": [{"role": "user", "content": "hi"}], **fields})
        return api.state.tokenizer.decode(api.asked.prompt[-30:])

    assert end().endswith("<think>\n")
    assert end(chat_template_kwargs={"enable_thinking": True}).endswith("<think>\n")
    for off in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        assert end(**off).endswith("<think>\n\n</think>\n\n")


BAD = {
    "truncated": (data_url(PNG[:300]), "broken or truncated"),
    "one pixel": (data_url(file_of(picture(1, 1, 1))), "1 x 1"),
    "bomb": (data_url(bomb(20000)), "pixels"),
    "text": (data_url(b"hello"), "no image that can be read"),
    "svg": (data_url(b"<svg/>", "image/svg+xml"), "no image that can be read"),
    "pdf": (data_url(b"%PDF", "application/pdf"), "not an image"),
    "no base64": ("data:image/png;base64,%%%", "not base64"),
    "percent": ("data:image/png,abc", "base64"),
    "remote": ("https://example.com/a.png", "not allowed"),
    "file": ("file:///etc/passwd", "not allowed"),
    "another scheme": ("ftp://example.com/a.png", "neither"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_images_are_refused(api, name):
    url, words = BAD[name]
    error = api.error(CHAT, body(URL, url))
    assert words in error["message"]
    assert error["param"] == "messages[0].content[1]"
    assert not api.client.submitted


def test_too_many(seeing):
    api = FakeApi(seeing, MEDIA, MediaLimits(images=1, videos=0))
    error = api.error(CHAT, body(URL, URL))
    assert "2 images, of at most 1" in error["message"]
    api.answer(CHAT, body(URL))
    small = FakeApi(seeing, MEDIA)
    small.state.media._longest = 30
    error = small.error(CHAT, body(*[URL] * 4))
    assert "are the most that fit" in error["message"]
    for made in (api, small):
        made.state.media.close()


def test_memory_of_images_is_bounded(api, monkeypatch):
    size = len(prepared_image(decoded(PNG, 10**6), MEDIA).item.pixels)
    monkeypatch.setattr("cairn.server.media.MAX_HELD", 2 * size)
    api.answer(CHAT, body(URL, URL))
    kept = api.asked.media
    assert "take the memory" in api.error(CHAT, body(URL), 429)["message"]
    api.client.submitted.clear()
    assert len(kept.items) == 2
    del kept
    gc.collect()
    api.answer(CHAT, body(URL))


def test_placeholders_in_a_users_text(api):
    error = api.error(CHAT, {"messages": question(URL, text="<|image_pad|>")})
    assert "2 placeholders of images, but 1 images" in error["message"]


def test_a_model_that_reads_text_only(tokenizer):
    error = FakeApi(tokenizer).error(CHAT, body(URL))
    assert "messages[0].content[0] is an image, but this model reads text only" in error["message"]


def test_a_template_without_images(tmp_path):
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    for template in (plain, None):
        api = FakeApi(Tokenizer(write(tmp_path, template)), MEDIA)
        api.answer(CHAT, body(URL))
        assert len(api.asked.media.spans) == 1
        api.state.media.close()


@pytest.fixture
def host(tmp_path):
    """A web server with an image, a redirect to it and one to another host."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path == "/a.png":
                self.send_response(200)
                self.end_headers()
                self.wfile.write(PNG)
            else:
                self.send_response(302 if "to" in self.path else 404)
                away = "http://localhost:1/x" if "away" in self.path else "/a.png"
                self.send_header("Location", away)
                self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_allowed_places(seeing, host, tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "a.png").write_bytes(PNG)
    (tmp_path / "secret.png").write_bytes(PNG)
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    limits = MediaLimits(folder=str(folder), domains=("127.0.0.1",))
    api = FakeApi(seeing, MEDIA, limits)
    for url in (f"file://{folder}/a.png", f"{host}/a.png", f"{host}/to"):
        api.answer(CHAT, body(url))
    for url, words in (
        (f"file://{tmp_path}/secret.png", "not in the folder"),
        (f"file://{folder}/../secret.png", "not in the folder"),
        (f"file://{folder}/link.png", "not in the folder"),
        (f"file://{folder}/none.png", "cannot be read"),
        (f"{host}/none", "cannot be fetched"),
        (f"{host}/away-to", "not allowed"),
        (host.replace("127.0.0.1", "localhost") + "/a.png", "not allowed"),
    ):
        assert words in api.error(CHAT, body(url))["message"], url
    api.state.media.close()


def test_a_server_reads_images_and_survives_bad_ones(tmp_path):
    """The same image gives the same output, cached or not, with any requests in between."""
    folder = write(tmp_path / "model")
    flags = ("--load-format", "random", "--dtype", "float32", "--limit-mm-per-prompt", "image=2")
    with running(tmp_path, str(folder), *flags) as server:

        def ask(*urls):
            fields = body(*urls, temperature=0, max_tokens=6, logprobs=True, top_logprobs=3)
            return httpx.post(server.url + CHAT, json=fields, timeout=60)

        first = ask(URL).json()["choices"]
        for url, _ in BAD.values():
            assert ask(url).status_code == 400
        assert ask(URL, URL, URL).status_code == 400
        used = psutil.Process(server.process.pid).memory_info().rss
        other = ask(data_url(file_of(picture(2)))).json()["choices"]
        assert ask(URL).json()["choices"] == first != other
        assert used < 2 << 30
        assert server.ledger()["owned"] == 0
