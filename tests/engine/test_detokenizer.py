"""Streamed text: every way to cut an output gives the text of the whole."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from cairn.config import default_model_path
from cairn.engine.detokenizer import WindowDetokenizer
from cairn.engine.tokenizer import Tokenizer
from tests.engine import vocabularies
from tests.engine.vocabularies import damaged, texts

COUNT = 2000
FAMILIES = ("qwen", "llama", "gemma", "unigram", "wordpiece", "suffixed")
BY_BYTES = FAMILIES[:5]
FALLBACK = ("llama", "gemma")


@pytest.fixture(scope="module")
def bytewise() -> Tokenizer:
    """The tokenizer of the embedded model: token id = byte."""
    return Tokenizer(default_model_path())


@pytest.fixture(scope="module")
def families(tmp_path_factory) -> dict[str, Tokenizer]:
    folder: Path = tmp_path_factory.mktemp("tokenizers")
    return {name: Tokenizer(getattr(vocabularies, name)(folder / name)) for name in FAMILIES}


def streamed(tokenizer: Tokenizer, ids, prompt=()) -> str:
    stream = tokenizer.detokenizer(prompt)
    return "".join([*map(stream.push, ids), stream.flush()])


def whole(tokenizer: Tokenizer, ids) -> str:
    """Decoding by the tokenizer library."""
    return tokenizer._decode_window(list(ids))


def random_ids(tokenizer: Tokenizer, rng: random.Random, skip=frozenset()) -> list[int]:
    """Random ids, some of them without a token."""
    size = tokenizer.size + 3
    return [i for i in (rng.randrange(size) for _ in range(rng.randint(0, 25))) if i not in skip]


def byte_ids(tokenizer: Tokenizer) -> list[int]:
    """Ids of the byte-fallback tokens, by byte."""
    return [tokenizer._backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]


def test_every_split_of_every_string(bytewise):
    rng = random.Random(7)
    for text in texts(COUNT, seed=7, most=8):
        valid = rng.random() < 0.5
        data = text.encode() if valid else damaged(text, rng)
        expected = data.decode(errors="replace")
        assert whole(bytewise, data) == expected
        for at in range(len(data) + 1):
            stream = bytewise.detokenizer()
            first = stream.push(*data[:at])
            assert first + stream.push(*data[at:]) + stream.flush() == expected
            # Complete characters are not held back, incomplete ones are not shown.
            assert not valid or first == data[:at].decode(errors="ignore")


def test_random_bytes_one_by_one(bytewise):
    rng = random.Random(8)
    edges = bytes.fromhex("00417f80bfc0c1c2dfe0a09fe1edeff0f48f90f5fffe")
    for _ in range(COUNT):
        data = bytes(rng.choices(edges, k=rng.randint(1, 12)))
        assert streamed(bytewise, data) == data.decode(errors="replace")


@pytest.mark.parametrize("name", FAMILIES)
def test_encoded_strings_token_by_token(families, name):
    tokenizer = families[name]
    for text in texts(COUNT if name in BY_BYTES else 500, seed=9):
        ids = tokenizer.encode(text)
        expected = whole(tokenizer, ids)
        assert streamed(tokenizer, ids) == expected == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["qwen", "llama"])
def test_encoded_strings_at_every_token(families, name):
    tokenizer = families[name]
    for text in texts(1000, seed=10, most=8):
        ids = tokenizer.encode(text)
        expected = tokenizer.decode(ids)
        for at in range(len(ids) + 1):
            stream = tokenizer.detokenizer()
            pieces = stream.push(*ids[:at]), stream.push(*ids[at:]), stream.flush()
            assert "".join(pieces) == expected


@pytest.mark.parametrize("name", BY_BYTES)
def test_any_ids_decode_as_the_library_does(families, name):
    tokenizer = families[name]
    rng = random.Random(11)
    # Random byte-fallback tokens are not text; they have separate tests.
    skip = frozenset(byte_ids(tokenizer) if name in FALLBACK else ())
    for _ in range(1000):
        ids = random_ids(tokenizer, rng, skip)
        assert streamed(tokenizer, ids) == whole(tokenizer, ids) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", BY_BYTES)
def test_an_output_goes_on_behind_its_prompt(families, name):
    tokenizer = families[name]
    rng = random.Random(12)
    for text in texts(500, seed=12, most=6):
        prompt, ids = tokenizer.encode(text), tokenizer.encode(rng.choice(vocabularies.WORDS))
        special = sorted(tokenizer.special_ids)[:1] * rng.randint(0, 7)
        before = whole(tokenizer, [*prompt, *special])
        together = whole(tokenizer, [*prompt, *special, *ids])
        assert streamed(tokenizer, ids, [*prompt, *special]) == together[len(before) :]


def sentencepiece_text(data: bytes) -> str:
    """Decode bytes as sentencepiece does: an invalid byte is one replacement character."""
    text, at = "", 0
    while at < len(data):
        for size in range(1, 5):
            try:
                text += data[at : at + size].decode()
            except UnicodeDecodeError:
                continue
            at += size
            break
        else:
            text += "\ufffd"
            at += 1
    return text


@pytest.mark.parametrize("name", FALLBACK)
def test_byte_fallback(families, name):
    tokenizer = families[name]
    rng = random.Random(13)
    ids_of_bytes = byte_ids(tokenizer)
    word = tokenizer._backend.token_to_id("stone") or tokenizer.encode("stone")[-1]
    end = tokenizer.eos_token_id
    good = wrong = 0
    for text in texts(2000, seed=13, most=3):
        data = text.encode() if rng.random() < 0.5 else damaged(text, rng)
        at = rng.randint(0, len(data))
        ids = [ids_of_bytes[byte] for byte in data]
        # A special token inside a character does not split it, a word does.
        inner = rng.choice((word, end))
        between = tokenizer.token_text(word) if inner == word else ""
        expected = sentencepiece_text(b"x" + data[:at] + between.encode() + data[at:])
        ids = [ids_of_bytes[ord("x")], *ids[:at], inner, *ids[at:]]
        assert streamed(tokenizer, ids) == expected
        if "\ufffd" not in whole(tokenizer, ids):
            good += 1
            assert expected == whole(tokenizer, ids)
        else:
            wrong += 1
    assert good > 300 and wrong > 300


def test_a_leading_space_is_cut_once(families):
    tokenizer = families["llama"]
    ids = tokenizer.encode("stone")
    assert tokenizer._backend.id_to_token(ids[0]).startswith("▁")
    assert tokenizer.decode(ids) == "stone"
    assert tokenizer.decode(ids + ids) == "stone stone"
    assert streamed(tokenizer, ids, prompt=ids) == " stone"
    start = tokenizer._backend.token_to_id("<s>")
    assert streamed(tokenizer, ids, prompt=[start, start]) == "stone"
    assert tokenizer.decode(tokenizer.encode("  two")) == "  two"


def test_special_tokens_are_left_out_and_added_ones_shown(families):
    tokenizer = families["qwen"]
    ids = tokenizer.encode("<|im_start|>a<think>b</think><|im_end|>two words é!", False)
    shown = [tokenizer.token_text(i) for i in ids]
    assert shown[0] == "<|im_start|>" and "<think>" in shown and "two words" in shown
    assert tokenizer.decode(ids) == whole(tokenizer, ids)
    assert tokenizer.decode(ids).startswith("a<think>b</think>two words ")
    assert tokenizer.decode([tokenizer.size, tokenizer.size + 10**6]) == ""


def test_a_special_token_inside_a_character(families):
    tokenizer = families["qwen"]
    a, b = (tokenizer._backend.token_to_id(stand_in) for stand_in in ("ð", "Ł"))
    ids = [a, tokenizer.eos_token_id, b, *tokenizer.encode("x")]
    assert streamed(tokenizer, ids) == whole(tokenizer, ids) == "\ufffdx"


def test_clean_up_of_spaces(tmp_path):
    plain = Tokenizer(vocabularies.unigram(tmp_path / "plain"))
    cleaned = Tokenizer(vocabularies.unigram(tmp_path / "cleaned", clean_up=True))
    rng = random.Random(14)
    names = ("▁", "▁.", "▁,", "'", ".", ",", "s", "n", "t", "m", "v", "e", "r", "?", "!")
    known = [i for name in names if (i := cleaned._backend.token_to_id(name)) is not None]
    assert len(known) > 10
    changed = 0
    for _ in range(1500):
        ids = [rng.choice(known) for _ in range(rng.randint(1, 15))]
        assert streamed(plain, ids) == whole(plain, ids)
        text = streamed(cleaned, ids)
        assert text == whole(cleaned, ids) == cleaned.decode(ids)
        changed += text != streamed(plain, ids)
    assert changed > 500


def test_clean_up_leaves_byte_pair_texts_alone(families):
    ids = families["qwen"].encode("a , b ' c .")
    assert families["qwen"].decode(ids) == "a , b ' c ."


def test_a_decoder_that_looks_at_neighbours(families):
    tokenizer = families["suffixed"]
    assert isinstance(tokenizer.detokenizer(), WindowDetokenizer)
    ids = tokenizer.encode("the landmark of and stone")
    assert streamed(tokenizer, ids) == "the landmark of and stone"
    prompt = tokenizer.encode("the landmark")
    assert prompt == ids[: len(prompt)]
    assert streamed(tokenizer, ids[len(prompt) :], prompt=prompt) == " of and stone"


def test_a_window_stays_short_whatever_comes():
    longest = 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return bytes(ids).decode(errors="replace")

    rng = random.Random(15)
    stream = WindowDetokenizer(decode, lambda token: token > 255, [65] * 100)
    noise = [0xFF] * 300 + [256] * 300 + [0xE2] * 300 + rng.choices(range(300), k=300)
    text = "".join(map(stream.push, [*noise, *"日本".encode(), 256]))
    assert text.endswith("日本")
    assert longest < 25


def test_wrong_bytes_for_ever_are_shown_at_once(bytewise, families):
    stream = bytewise.detokenizer()
    assert {stream.push(0xFF) for _ in range(1000)} == {"\ufffd"}
    stream.push(0xE2)
    assert {stream.push(0xE2) for _ in range(1000)} == {"\ufffd"}
    stream = families["gemma"].detokenizer()
    wrong = byte_ids(families["gemma"])[0xFF]
    assert {stream.push(wrong) for _ in range(1000)} == {"\ufffd"}


@pytest.mark.parametrize("name", ["qwen", "llama", "gemma"])
def test_bytes_of_tokens_joined_are_the_text(families, name):
    tokenizer = families[name]
    for text in texts(500, seed=16):
        ids = tokenizer.encode(text, add_special_tokens=False)
        joined = b"".join(map(tokenizer.token_bytes, ids)).decode()
        assert joined.removeprefix(" " if name == "llama" else "") == tokenizer.decode(ids)
    assert tokenizer.token_bytes(tokenizer.eos_token_id).decode() in ("</s>", "<|im_end|>")
    assert tokenizer.token_bytes(tokenizer.size + 5) == b""


def test_bytes_of_tokens(bytewise, families):
    assert [bytewise.token_bytes(i) for i in range(256)] == [bytes([i]) for i in range(256)]
    llama = families["llama"]
    assert [llama.token_bytes(i) for i in byte_ids(llama)] == [bytes([i]) for i in range(256)]
    assert re.match(" ", llama.token_text(llama.encode("stone")[0]))
    window = families["suffixed"]
    assert window.token_bytes(window.encode("the stone")[0]) == b"the"
