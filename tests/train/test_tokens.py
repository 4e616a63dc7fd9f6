"""Tokenizers are lossless; the byte tokenizer is the embedded model's."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from cairn.config import default_model_path
from cairn.errors import BadConfig
from cairn.train.tasks import ANSWER, IGNORED
from cairn.train.tokens import Vocabulary, byte_tokenizer, train_tokenizer

TEXT = "\tdef grüße(x):  # naïve — 你好\n    return f'{x!r}'\n\n\n" + "".join(
    map(chr, range(1, 300))
)
PIECES = [("\nWhat is it? It is ", IGNORED), ("48213.\n", ANSWER)]


def trained(size: int = 320) -> Tokenizer:
    return train_tokenizer([TEXT, "What is it? It is what it is. " * 50], size)


@pytest.mark.parametrize("make", [byte_tokenizer, trained])
def test_a_text_comes_back(make):
    vocabulary = Vocabulary(make())
    ids = vocabulary.encode(TEXT)
    assert vocabulary.tokenizer.decode(ids.tolist(), skip_special_tokens=False) == TEXT
    assert vocabulary.ends_line[vocabulary.encode("a\n")[-1]]
    assert not vocabulary.ends_line[vocabulary.encode("a")].any()


def test_bytes_are_the_embedded_models_tokens(tmp_path):
    own = Vocabulary(byte_tokenizer())
    own.save(tmp_path, 100)
    saved = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    shipped = Tokenizer.from_file(str(default_model_path() / "tokenizer.json"))
    assert own.encode(TEXT).tolist() == list(TEXT.encode())
    assert saved.encode(TEXT).ids == shipped.encode(TEXT).ids == list(TEXT.encode())
    assert saved.get_vocab() == shipped.get_vocab()


@pytest.mark.parametrize("make", [byte_tokenizer, trained])
def test_every_token_of_an_answer_is_one(make):
    vocabulary = Vocabulary(make())
    ids, classes = vocabulary.encode_pieces(PIECES)
    text = "".join(piece for piece, _ in PIECES)
    assert vocabulary.tokenizer.decode(ids.tolist()) == text
    answer = vocabulary.tokenizer.decode(ids[classes == ANSWER].tolist())
    assert answer.strip() == PIECES[1][0].strip()
    assert set(classes.tolist()) == {IGNORED, ANSWER}


def test_a_token_of_question_and_answer_belongs_to_the_answer():
    vocabulary = Vocabulary(train_tokenizer(["It is 48213. " * 50], 262))
    ids, classes = vocabulary.encode_pieces([("It is ", IGNORED), ("48213.", ANSWER)])
    tokens = [vocabulary.tokenizer.decode([i]) for i in ids]
    spanning = [kind for token, kind in zip(tokens, classes, strict=True) if token[:2] == " 4"]
    assert spanning == [ANSWER]


def test_impossible_sizes_are_refused():
    with pytest.raises(BadConfig, match="at least 256"):
        trained(100)
    with pytest.raises(BadConfig, match="tokens, not 5000"):
        trained(5000)
