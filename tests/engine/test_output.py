"""Text, stop conditions and held-back text of an output."""

from __future__ import annotations

import random
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from cairn.config import default_model_path
from cairn.engine.output import OutputStream
from cairn.engine.stops import StopString
from cairn.engine.tokenizer import Tokenizer
from cairn.types import Alternatives, CompletionOutput, FinishReason, SamplingParams
from tests.engine import vocabularies


@cache
def bytewise() -> Tokenizer:
    """The tokenizer of the embedded model: token id = byte."""
    return Tokenizer(default_model_path())


class Pieces:
    """A tokenizer whose ids are indices into a list of texts."""

    def __init__(self, pieces: list[str], special_texts: dict[int, str] | None = None) -> None:
        self.pieces = pieces
        self.special_texts = special_texts or {}

    def detokenizer(self, prompt, special=False):
        return SimpleNamespace(push=self.pieces.__getitem__, flush=lambda: "")


def stream(max_output=1000, eos_ids=(), tokenizer: Any = bytewise, **params) -> OutputStream:
    params = SamplingParams(max_tokens=None, **params)
    if tokenizer is bytewise:
        tokenizer = bytewise()
    return OutputStream(CompletionOutput(0), params, eos_ids, max_output, tokenizer, [65, 66])


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
    out = stream()
    pieces = []
    for byte in "é日".encode():
        out.push(byte, None)
        pieces.append(out.take())
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


def cut_offline(text: str, stops: tuple[str, ...]) -> tuple[str, str | None, int]:
    """The text before the stop string that ends first (the longest of those), the string, and its
    end."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop, end
    return text, None, len(text)


def in_pieces(text: str, rng: random.Random) -> list[str]:
    """The text cut at random positions, with empty pieces."""
    borders = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, len(text))))
    return [text[a:b] for a, b in zip([0, *borders], [*borders, len(text)], strict=True)]


def possible(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest suffix of `text` that may begin a stop string."""
    sizes = (n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n]))
    return max(sizes, default=0)


@pytest.mark.parametrize("letters", ["ab", "abc", "aé日"])
def test_stop_strings_at_random_borders(letters):
    rng = random.Random(5)
    stopped = 0
    for _ in range(1000):
        text = "".join(rng.choices(letters, k=rng.randint(1, 30)))
        stops = tuple(
            "".join(rng.choices(letters, k=rng.randint(1, 7))) for _ in range(rng.randint(1, 3))
        )
        pieces = in_pieces(text, rng)
        out = stream(stop=stops, max_output=len(pieces), tokenizer=Pieces(pieces))
        expected, stop, end = cut_offline(text, stops)
        given, shown = "", ""
        for i in range(len(pieces)):
            given += pieces[i]
            reason = out.push(i, None)
            shown += out.take()
            if reason is not None:
                break
            # All text is shown that no stop string can remove.
            assert shown == given[: len(given) - possible(given, stops)]
        assert shown == out.output.text == expected
        assert out.output.stop_reason == stop
        assert out.output.finish_reason == ("length" if stop is None else "stop")
        assert stop is None or len(given) - len(pieces[i]) < end <= len(given)
        stopped += stop is not None
    assert stopped > 300


def test_stop_strings_over_bytes_of_characters():
    rng = random.Random(6)
    for _ in range(300):
        text = "".join(rng.choices("né👍🏽ि", k=30))
        stops = tuple("".join(rng.choices("né👍🏽ि", k=rng.randint(1, 3))) for _ in range(2))
        out = stream(stop=stops, max_output=len(text.encode()))
        expected, stop, _ = cut_offline(text, stops)
        assert feed(out, text.encode()) == out.output.text == expected
        assert out.output.stop_reason == stop


def test_a_stop_string_may_end_in_the_last_replacement_sign():
    out = stream(stop="\ufffd", max_output=2)
    assert feed(out, b"a\xe6") == "a" == out.output.text
    assert out.output.finish_reason == "stop"


def test_a_stop_string_that_ends_too_early_does_not_count():
    out = stream(stop="ab", min_tokens=3)
    assert feed(out, b"abaab") == "aba" == out.output.text
    out = stream(stop="aab", min_tokens=3)
    assert feed(out, b"aaab") == "a" == out.output.text


def test_a_long_stop_string_costs_what_is_matched():
    stop = StopString("ab" * 10_000_000)
    for _ in range(1000):
        assert stop.feed("ab") == 0
    assert stop.matched == 2000
    assert stop.feed("x") == stop.matched == 0
    stop = StopString("a" * 1000 + "b")
    assert stop.feed("a" * 50_000) == 0
    assert stop.feed("b") == 1


def test_an_aborted_output_keeps_what_was_held_back():
    out = stream(stop="end")
    assert feed(out, b"the en") == "the "
    out.finish(FinishReason.ABORT)
    assert out.take() == "en" and out.output.text == "the en"


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_a_stop_string_does_not_hide_why_an_output_broke_off(reason):
    out = stream(stop="\ufffd")
    assert feed(out, b"a\xe6") == "a"
    assert out.finish(reason) == reason == out.output.finish_reason


def test_without_a_tokenizer_there_is_no_text():
    out = stream(max_output=2, tokenizer=None)
    assert feed(out, b"ab") == out.output.text == ""


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
    entry = Alternatives(-0.5, [65, 66], [-0.5, -1.0], [1, 2])
    out.push(65, entry)
    assert out.output.cumulative_logprob == -0.5
    assert out.output.logprobs[0][65].logprob == -0.5
    assert out.output.logprobs[0][66].rank == 2
    assert out.output.logprobs[0][65].decoded_token == "A"
    assert list(out.output.logprobs[0]) == [65, 66]


def written_out(pieces: list[str], special: dict[int, str]) -> str:
    return "".join(special.get(i, piece) for i, piece in enumerate(pieces))


@pytest.mark.parametrize("stop", ["<|end|>", "ab<|end|>", "<|end|>ab", "<|a|><|end|>", "b<|end|>a"])
def test_a_stop_string_with_a_special_token_in_it(stop):
    pieces = ["ba", "", "ab", "", "ab", "", "", "aba"]
    special = {1: "<|a|>", 3: "<|end|>", 5: "<|a|>", 6: "<|end|>"}
    out = stream(stop=stop, max_output=8, tokenizer=Pieces(pieces, special))
    taken = ""
    for i in range(8):
        reason = out.push(i, None)
        taken += out.take()
        if reason is not None:
            break
    before = written_out(pieces, special).partition(stop)[0]
    for name in special.values():
        before = before.replace(name, "")
    assert taken == out.output.text == before
    assert (out.output.finish_reason, out.output.stop_reason) == ("stop", stop)


def test_special_tokens_in_stop_strings_at_random_borders():
    rng = random.Random(7)
    stopped = 0
    for _ in range(1000):
        size = rng.randint(1, 20)
        special = {i: rng.choice(["X", "YZ"]) for i in range(size) if rng.random() < 0.4}
        pieces = ["" if i in special else "".join(rng.choices("ab", k=2)) for i in range(size)]
        parts = ["a", "b", "X", "YZ"]
        stops = tuple("".join(rng.choices(parts, k=rng.randint(1, 4))) for _ in range(2))
        out = stream(stop=stops, max_output=size, tokenizer=Pieces(pieces, special))
        taken = ""
        for i in range(size):
            reason = out.push(i, None)
            taken += out.take()
            if reason is not None:
                break
        full, plain = written_out(pieces, special), "".join(pieces)
        marked = tuple(stop for stop in stops if any(name in stop for name in special.values()))
        unmarked = tuple(stop for stop in stops if stop not in marked)
        cut = cut_offline(full, marked) if marked else (full, None, 0)
        text = "".join(c for c in cut[0] if c in "ab")
        if not unmarked:
            assert taken == out.output.text == text
            assert out.output.stop_reason == cut[1]
        elif not marked:
            assert taken == out.output.text == cut_offline(plain, unmarked)[0]
        else:
            assert taken == out.output.text
        stopped += out.output.stop_reason is not None
    assert stopped > 300


def test_a_special_token_in_no_stop_string_does_not_break_the_others():
    out = stream(stop="abc", max_output=3, tokenizer=Pieces(["xab", "", "cd"], {1: "<|end|>"}))
    assert [out.push(i, None) for i in range(3)] == [None, None, "stop"]
    assert out.output.text == "x"


def test_a_special_stop_token_before_min_tokens_does_not_count():
    pieces = Pieces(["a", "", "b", ""], {1: "<|end|>", 3: "<|end|>"})
    out = stream(stop="<|end|>", min_tokens=3, max_output=4, tokenizer=pieces)
    assert [out.push(i, None) for i in range(4)] == [None, None, None, "stop"]
    assert (out.output.text, out.output.stop_reason) == ("ab", "<|end|>")


def test_a_special_stop_token_that_is_spelled_in_letters():
    pieces = Pieces(["a<|en", "d|>b"], {7: "<|end|>"})
    out = stream(stop="<|end|>", max_output=2, tokenizer=pieces)
    assert [out.push(i, None) for i in range(2)] == [None, "stop"]
    assert out.output.text == "a"


def test_special_tokens_of_a_real_tokenizer_are_stop_strings(tmp_path):
    tokenizer = Tokenizer(vocabularies.qwen(tmp_path / "qwen"))
    for token, name in sorted(tokenizer.special_texts.items()):
        ids = [*tokenizer.encode("one two"), token, *tokenizer.encode(" three")]
        out = stream(stop=("three", name), tokenizer=tokenizer)
        reasons = [out.push(i, None) for i in ids[: ids.index(token) + 1]]
        assert reasons == [None] * (len(reasons) - 1) + ["stop"]
        assert (out.output.text, out.output.stop_reason) == ("one two", name)


def test_include_stop_str_in_output_keeps_the_stop_string():
    out = stream(stop=("st", "x"), include_stop_str_in_output=True)
    assert feed(out, b"a stop") == "a st" == out.output.text
    assert out.output.stop_reason == "st"
    out = stream(stop_token_ids=(ord("!"),), include_stop_str_in_output=True)
    assert feed(out, b"so! no") == "so!"
    out = stream(eos_ids=(ord("."),), include_stop_str_in_output=True)
    assert feed(out, b"so. no") == "so."


def test_special_tokens_show_when_asked_for(tmp_path):
    tokenizer = Tokenizer(vocabularies.qwen(tmp_path / "qwen"))
    (sign,) = tokenizer.encode("<|im_start|>")
    ids = [*tokenizer.encode("a b"), sign, *tokenizer.encode("c")]
    for skip, text in ((True, "a bc"), (False, "a b<|im_start|>c")):
        out = stream(tokenizer=tokenizer, skip_special_tokens=skip)
        for token in ids:
            out.push(token, None)
        out.finish(FinishReason.LENGTH)
        assert out.output.text == text
    out = stream(tokenizer=tokenizer, skip_special_tokens=False, stop=("b<|im_start|>",))
    reasons = [out.push(token, None) for token in ids[: ids.index(sign) + 1]]
    assert reasons[-1] is FinishReason.STOP and out.output.text == "a "
