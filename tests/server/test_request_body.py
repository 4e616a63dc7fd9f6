"""Reading a request without blocking others."""

import json
import threading

import pytest

PATH = "/v1/completions"


class Watched:
    """A tokenizer that records the threads that encode."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.threads = []

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def encode(self, *arguments, **options):
        self.threads.append(threading.current_thread())
        return self._tokenizer.encode(*arguments, **options)


@pytest.mark.parametrize("size, elsewhere", [(100, False), (20_000, True)])
def test_long_texts_are_encoded_in_a_thread(api, size, elsewhere):
    api.state.tokenizer = watched = Watched(api.state.tokenizer)
    api.post(PATH, {"prompt": "x" * size})
    (thread,) = watched.threads
    assert (thread is not threading.main_thread()) == elsewhere


@pytest.mark.parametrize(
    "encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"]
)
@pytest.mark.parametrize("text", ["é日😀", "嬀嬀嬀" * 100])
def test_a_byte_order_mark_is_skipped(api, encoding, text):
    body = json.dumps({"prompt": text}, ensure_ascii=False)
    if encoding.endswith("e"):
        body = f"\ufeff{body}"
    answer = api.request(
        "POST", PATH, content=body.encode(encoding), headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 200, answer.text
    assert bytes(api.asked.prompt).decode() == text


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"prompt": "h\xe9"}', "0xe9 at byte 13"),
        (b'\xef\xbb\xbf{"prompt": "h\xe9"}', "utf-8, but is none at byte 16"),
        (b"\xff\xfe{", "utf-16-le, but is none at byte 2"),
        (b'\xef\xbb\xbf{"prompt": ', "not valid JSON"),
        (b"\xef\xbb\xbf", "the body is empty"),
        (b"\x1f\x8b\x08\x00", "Content-Encoding: gzip"),
    ],
)
def test_errors_of_invalid_utf_8_name_the_position(api, body, words):
    answer = api.request("POST", PATH, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
