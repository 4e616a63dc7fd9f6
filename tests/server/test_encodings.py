"""Compressed request bodies."""

from __future__ import annotations

import gzip
import json
import zlib

import pytest

from tests.server.fake_api import FakeApi

PATH = "/v1/completions"
PLAIN = json.dumps({"prompt": "hi", "max_tokens": 2}).encode()


def gzipped(data: bytes) -> bytes:
    """The same bytes at every collection of the tests: without a timestamp."""
    return gzip.compress(data, mtime=0)


BARE = zlib.compressobj(wbits=-15)
DEFLATED = BARE.compress(PLAIN) + BARE.flush()


def post(api, body, encoding, **headers):
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding, **headers}
    return api.request("POST", PATH, content=body, headers=headers)


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", gzipped(PLAIN)),
        ("GZip", gzipped(PLAIN)),
        ("x-gzip", gzipped(PLAIN)),
        ("gzip", gzipped(PLAIN[:9]) + gzipped(PLAIN[9:])),
        ("deflate", zlib.compress(PLAIN)),
        ("deflate", DEFLATED),
        ("deflate, gzip", gzipped(zlib.compress(PLAIN))),
        ("gzip,gzip", gzipped(gzipped(PLAIN))),
        ("identity", PLAIN),
        ("identity, gzip", gzipped(PLAIN)),
    ],
)
def test_a_compressed_body_is_read(api, encoding, body):
    answer = post(api, body, encoding)
    assert answer.status_code == 200, answer.text
    assert bytes(api.asked.prompt) == b"hi"


@pytest.mark.parametrize("encoding", ["br", "zstd", "compress", "gzip, br", "br, gzip", "utf-8"])
def test_an_unknown_encoding_is_named(api, encoding):
    answer = post(api, gzipped(PLAIN), encoding)
    assert answer.status_code == 415
    assert answer.headers["accept-encoding"] == "gzip, deflate"
    name = encoding.replace("gzip", "").strip(", ")
    assert repr(name) in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", PLAIN),
        ("gzip", gzipped(PLAIN)[:-5]),
        ("gzip", gzipped(PLAIN)[:10]),
        ("gzip", gzipped(PLAIN)[:-6] + b"wrong!"),
        ("gzip", gzipped(PLAIN) + b"more"),
        ("deflate", PLAIN),
        ("deflate", zlib.compress(PLAIN)[:-6]),
        ("deflate", zlib.compress(PLAIN) + b"more"),
    ],
)
def test_a_body_that_is_not_what_it_says(api, encoding, body):
    answer = post(api, body, encoding)
    assert answer.status_code == 400
    assert encoding in answer.json()["error"]["message"]
    assert not api.client.submitted


@pytest.mark.parametrize("compress", [gzip.compress, zlib.compress], ids=["gzip", "deflate"])
def test_the_bound_is_that_of_the_decoded_body(tokenizer, compress):
    api = FakeApi(tokenizer, max_body_bytes=2000)
    encoding = "gzip" if compress is gzip.compress else "deflate"
    for size, status in ((2000, 200), (2001, 413), (50_000_000, 413)):
        body = b'{"prompt": "' + b"x" * (size - 14) + b'"}'
        assert len(body) == size
        answer = post(api, compress(body), encoding)
        assert answer.status_code == status, answer.text
    deep = compress(b"[" * 1500)
    assert "nested" in post(api, deep, encoding).json()["error"]["message"]
