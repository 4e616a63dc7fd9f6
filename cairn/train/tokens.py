"""Tokenizers: bytes, or byte-pair encoding trained on the data. Both are lossless."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from cairn.errors import BadConfig
from cairn.train.recipe import BYTES
from cairn.train.tasks import Piece

Array: TypeAlias = NDArray[Any]

LEAST = 256
"""Number of byte tokens; with all of them any text can be encoded."""


def byte_characters() -> list[str]:
    """The printable character that stands for each byte in a byte-level tokenizer's file."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in own]
    stands = {byte: chr(byte) for byte in own}
    stands |= {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [stands[byte] for byte in range(256)]


def byte_tokenizer() -> Tokenizer:
    """Token id = byte value."""
    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def train_tokenizer(texts: Iterable[str], size: int) -> Tokenizer:
    """Train a byte-pair encoding with `size` tokens on texts.

    Raises:
        BadConfig: `size` is less than 256, or there is too little text for it.
    """
    if size < LEAST:
        raise BadConfig(f"tokenizer is {size}", f"Write at least {LEAST}: every byte is a token")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    found = tokenizer.get_vocab_size()
    if found != size:
        raise BadConfig(f"the data give {found} tokens, not {size}", f"Write tokenizer: {found}")
    return tokenizer


class Vocabulary:
    """Text to token ids.

    Args:
        tokenizer: of the tokenizers library.

    Attributes:
        size: tokens.
        ends_line: [size] bool, whether a token's text ends with a newline.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.size: int = tokenizer.get_vocab_size()
        characters = byte_characters()
        names = [str(tokenizer.id_to_token(i)) for i in range(self.size)]
        self.ends_line = np.array([name.endswith(characters[ord("\n")]) for name in names])
        self._are_bytes = names == characters

    def encode(self, text: str) -> Array:
        """Ids of a text."""
        if self._are_bytes:
            return np.frombuffer(text.encode(), np.uint8).astype(np.int32)
        return np.array(self.tokenizer.encode(text).ids, np.int32)

    def encode_pieces(self, pieces: Sequence[Piece]) -> tuple[Array, Array]:
        """Ids of the pieces' text as a whole, and the class of each id.

        A token that spans two pieces has the larger class.
        """
        text = "".join(piece for piece, _ in pieces)
        if self._are_bytes:
            classes = [np.full(len(piece.encode()), kind, np.uint8) for piece, kind in pieces]
            return self.encode(text), np.concatenate(classes)
        by_character = np.concatenate([np.full(len(p), kind, np.uint8) for p, kind in pieces])
        encoding = self.tokenizer.encode(text)
        found = [by_character[a : max(a + 1, b)].max() for a, b in encoding.offsets]
        return np.array(encoding.ids, np.int32), np.array(found, np.uint8)

    def save(self, folder: Path, context: int) -> None:
        """Write tokenizer.json and tokenizer_config.json.

        Args:
            folder: exists.
            context: longest text in tokens, as the model's config says.
        """
        (folder / "tokenizer.json").write_text(
            self.tokenizer.to_str(pretty=True) + "\n", encoding="utf-8"
        )
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": context,
        }
        text = json.dumps(config, indent=1) + "\n"
        (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def make_vocabulary(kind: str | int, texts: Iterable[str]) -> Vocabulary:
    """The recipe's tokenizer; `texts` are read only if it is to be trained."""
    if isinstance(kind, str):
        assert kind == BYTES
        return Vocabulary(byte_tokenizer())
    return Vocabulary(train_tokenizer(texts, kind))
