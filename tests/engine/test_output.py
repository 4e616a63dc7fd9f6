"""Text, stop conditions and hold-back of one output."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from cairn.engine.output import OutputStream, held_back
from cairn.engine.tokenizer import Detokenizer
from cairn.types import CompletionOutput, FinishReason, SamplingParams


class Bytes:
    """A byte-level tokenizer: id = byte; id 256 is a special token without text."""

    def decode(self, ids):
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def token_text(self, token):
        return self.decode([token])


def stream(max_output=1000, eos_ids=(), **params) -> OutputStream:
    return OutputStream(
        CompletionOutput(0), SamplingParams(**params), eos_ids, max_output, Bytes(), [65, 66]
    )


def feed(out: OutputStream, data: bytes) -> str:
    """Push bytes until the output ends; returns the joined pieces."""
    pieces = []
    for byte in data:
        reason = out.push(byte, None)
        pieces.append(out.take())
        if reason is not None:
            break
    return "".join(pieces)


@pytest.mark.parametrize("text", ["plain", "é", "日本語 text", "👩‍👩‍👧‍👦 family", "हिन्दी", "a�b"])
def test_pieces_joined_are_the_text(text):
    out = stream()
    joined = feed(out, text.encode())
    out.finish(FinishReason.LENGTH)
    assert joined + out.take() == text == out.output.text


def test_no_piece_holds_half_a_character():
    detokenizer = Detokenizer(Bytes(), [65])
    pieces = [detokenizer.push(byte) for byte in "é日".encode()]
    assert pieces == ["", "é", "", "", "日"]


def test_an_unfinished_character_shows_at_the_end():
    out = stream(max_output=2)
    joined = feed(out, b"a\xe6")
    assert joined == "a�" == out.output.text


def test_invalid_bytes_do_not_swallow_what_follows():
    rng = random.Random(3)
    for _ in range(200):
        data = bytes(rng.randrange(256) for _ in range(rng.randint(1, 40)))
        out = stream(max_output=len(data))
        joined = feed(out, data)
        assert joined == out.output.text == data.decode("utf-8", errors="replace")


def test_stop_string_across_tokens_is_cut_and_never_shown():
    rng = random.Random(5)
    for _ in range(300):
        stops = tuple("".join(rng.choices("ab", k=rng.randint(1, 4))) for _ in range(2))
        text = "".join(rng.choices("abc", k=30))
        out = stream(stop=stops, max_output=30)
        joined = feed(out, text.encode())
        ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
        if ends:
            first_end = min(ends)[0]
            cut = min(at for end, at in ends if end == first_end)
            assert out.output.text == text[:cut]
            assert out.output.finish_reason == "stop"
            assert out.output.stop_reason in stops
            assert len(out.output.token_ids) == first_end
        else:
            assert out.output.text == text
            assert out.output.finish_reason == "length"
        assert joined == out.output.text


def test_only_a_possible_stop_is_held_back():
    assert held_back("abc", ("cd",)) == 1
    assert held_back("abcd", ("cd",)) == 0
    assert held_back("xab", ("abab", "b!")) == 2
    assert held_back("xyz", ("abc",)) == 0


def test_eos_and_stop_ids():
    out = stream(eos_ids=(10,), stop_token_ids=(11,))
    assert out.push(65, None) is None
    assert out.push(10, None) == "stop"
    assert (out.output.text, out.output.token_ids, out.output.stop_reason) == ("A", [65, 10], None)
    out = stream(eos_ids=(10,), stop_token_ids=(11,))
    out.push(11, None)
    assert (out.output.finish_reason, out.output.stop_reason) == ("stop", 11)


def test_min_tokens_delays_every_stop():
    out = stream(min_tokens=3, stop="A", stop_token_ids=(66,))
    assert out.push(65, None) is None
    assert out.push(66, None) is None
    assert out.push(66, None) == "stop"


def test_max_output_is_length():
    out = stream(max_output=2)
    assert out.push(65, None) is None
    assert out.push(66, None) == "length"


def test_logprobs_are_collected():
    out = stream(logprobs=1)
    entry = SimpleNamespace(chosen=-0.5, ids=[65, 66], values=[-0.5, -1.0], ranks=[1, 2])
    out.push(65, entry)
    assert out.output.cumulative_logprob == -0.5
    assert out.output.logprobs[0][65].logprob == -0.5
    assert out.output.logprobs[0][66].rank == 2
    assert out.output.logprobs[0][65].decoded_token == "A"
    assert list(out.output.logprobs[0]) == [65, 66]
