"""Incremental detokenisation: byte-exact text of a growing output, with constant work per token.

A tokenizer's decoder defines the bytes of its tokens. In the families that models use (byte-level
BPE; sentencepiece, with or without byte fallback; WordPiece) a token has the same bytes wherever it
stands, except at the beginning of a text. `Rules` reads that from the decoder's own description,
`Spelling` gives the bytes of an id, and `ByteDetokenizer` makes text of them. Any other decoder is
run again and again over a short window (`WindowDetokenizer`).

Where the tokenizer library's decoding of a whole output needs to know what comes later, the stream
defines the text: the library turns every character of a run of byte-fallback tokens into
replacement signs when one byte of the run is wrong, the first ones too, which are out by then.
Here a wrong byte becomes one replacement sign and the good characters beside it stay, as in
sentencepiece itself. Outputs that are valid UTF-8 are the same in both.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tokenizers import Tokenizer as Backend

REPLACEMENT = "\ufffd"

WINDOW_CONTEXT = 5
"""Tokens of the prompt that give a window its context."""
WINDOW_PENDING = 8
"""Tokens that a window holds back at most; an unfinished character has three."""

CLEAN_UPS = (
    *((f" {sign}", sign) for sign in ".?!,"),
    (" ' ", "'"),
    *((f" {short}", short) for short in ("n't", "'m", "'s", "'ve", "'re")),
)
"""What `clean_up_tokenization_spaces` replaces, one after the other."""

Change = Callable[[str], str]


def cleaned(text: str) -> str:
    """A whole text with all of `CLEAN_UPS` replaced."""
    for old, new in CLEAN_UPS:
        text = text.replace(old, new)
    return text


class Detokenizer(Protocol):
    """Text of one output; the pieces joined, with the flush at the end, are the text."""

    def push(self, *tokens: int) -> str:
        """The text completed by `tokens`; an unfinished character waits for its last byte."""

    def flush(self) -> str:
        """The rest, when no token follows: an unfinished character becomes replacement signs."""


def _wrong_bytes(error: UnicodeError) -> tuple[str, int]:
    """One replacement sign per wrong byte."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error("cairn_each_byte", _wrong_bytes)


def _byte_of_character() -> dict[str, int]:
    """The printable stand-ins that byte-level BPE writes for bytes (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_of_character()
FALLBACK_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


def _bytes_of_text(token: str) -> bytes:
    return token.encode()


def _bytes_of_byte_level(token: str) -> bytes:
    try:
        return bytes([BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        # Added tokens are stored as plain text, not in byte-level BPE's byte characters.
        return token.encode()


def _bytes_of_fallback(token: str) -> bytes:
    match = FALLBACK_BYTE.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.encode()


@dataclass(frozen=True)
class Rules:
    """What a decoder makes of single tokens.

    Attributes:
        first: changes of a token that begins the text, in order.
        other: changes of every other token, in order.
        to_bytes: bytes of the changed token.
        errors: how bytes that are not UTF-8 show, a name of `codecs`.
        strip: a character, and how many of it are cut from the head of the text.
    """

    first: tuple[Change, ...]
    other: tuple[Change, ...]
    to_bytes: Callable[[str], bytes] = _bytes_of_text
    errors: str = "replace"
    strip: tuple[str, int] = ("", 0)

    @classmethod
    def read(cls, decoder: dict[str, Any] | None) -> Rules | None:
        """The rules of a decoder's description (as in tokenizer.json), None where the text of a
        token depends on its neighbours."""
        if decoder is None:
            return cls(first=(), other=(_after_space,))
        first: list[Change] = []
        other: list[Change] = []
        to_bytes, errors, strip, fused = _bytes_of_text, "replace", ("", 0), False
        for step in _steps(decoder):
            kind = step["type"]
            if kind == "Fuse":
                fused = True
            elif fused and kind == "Strip" and step["stop"] == 0 and not strip[1]:
                strip = (step["content"], step["start"])
            elif fused or to_bytes is not _bytes_of_text:
                return None
            elif kind == "ByteLevel":
                to_bytes, fused = _bytes_of_byte_level, True
            elif kind == "ByteFallback":
                to_bytes, errors = _bytes_of_fallback, "cairn_each_byte"
            elif (changes := _changes(step)) is not None:
                first.append(changes[0])
                other.append(changes[1])
            else:
                return None
        return cls(tuple(first), tuple(other), to_bytes, errors, strip)


def _steps(decoder: dict[str, Any]) -> Iterable[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return (decoder,)
    return (step for part in decoder["decoders"] for step in _steps(part))


def _changes(step: dict[str, Any]) -> tuple[Change, Change] | None:
    """What a step makes of the first token and of the others, None for a step that looks at
    neighbours."""
    kind = step["type"]
    if kind == "Replace" and "String" in step["pattern"]:
        replace = _replace(step["pattern"]["String"], step["content"])
        return replace, replace
    if kind == "Metaspace":
        spaces = _replace(step["replacement"], " ")
        if step["prepend_scheme"] == "never":
            return spaces, spaces
        return _replace(step["replacement"], ""), spaces
    if kind == "Strip":
        strip = _strip(step["content"], step["start"], step["stop"])
        return strip, strip
    if kind == "WordPiece":
        clean = _clean_word if step["cleanup"] else str
        prefix = step["prefix"]

        def join(token: str) -> str:
            return clean(token[len(prefix) :] if token.startswith(prefix) else f" {token}")

        return clean, join
    return None


def _after_space(token: str) -> str:
    return f" {token}"


def _replace(old: str, new: str) -> Change:
    return lambda token: token.replace(old, new)


def _strip(character: str, start: int, stop: int) -> Change:
    def strip(token: str) -> str:
        begin, end = 0, len(token)
        while begin < min(start, end) and token[begin] == character:
            begin += 1
        while end > max(begin, len(token) - stop) and token[end - 1] == character:
            end -= 1
        return token[begin:end]

    return strip


def _clean_word(token: str) -> str:
    """The WordPiece decoder's own clean-up, token by token."""
    for old, new in (*CLEAN_UPS[:7], (" do not", " don't"), *CLEAN_UPS[7:]):
        token = token.replace(old, new)
    return token


class Spelling:
    """The bytes of every token id, worked out when first asked for.

    Args:
        backend: the tokenizer.
        rules: of its decoder.
        special: texts show special tokens.

    Attributes:
        spelled: what `spell` has given so far.
    """

    def __init__(self, backend: Backend, rules: Rules, special: bool = False) -> None:
        self.rules = rules
        self._backend = backend
        self._hidden = frozenset[str]() if special else hidden_tokens(backend)
        self.spelled: dict[int, bytes | None] = {}

    def spell(self, token: int) -> bytes | None:
        """Bytes of an id behind another one; None when it is no part of a text."""
        try:
            return self.spelled[token]
        except KeyError:
            known = self._backend.id_to_token(token)
            shown = known is not None and known not in self._hidden
            return self.spelled.setdefault(token, self.show(token) if shown else None)

    def spell_first(self, token: int) -> bytes | None:
        """Bytes of an id that begins a text; None when it is no part of one."""
        return None if self.spell(token) is None else self._bytes(token, self.rules.first)

    def show(self, token: int) -> bytes:
        """Bytes of an id, a special one's name too; empty for an id without a token."""
        return self._bytes(token, self.rules.other)

    def _bytes(self, token: int, changes: Sequence[Change]) -> bytes:
        text = self._backend.id_to_token(token)
        if text is None:
            return b""
        for change in changes:
            text = change(text)
        return self.rules.to_bytes(text)


def hidden_tokens(backend: Backend) -> frozenset[str]:
    """The special tokens, which texts leave out."""
    added = backend.get_added_tokens_decoder().values()
    return frozenset(token.content for token in added if token.special)


def describe_decoder(backend: Backend) -> dict[str, Any] | None:
    """The decoder as tokenizer.json describes it."""
    if backend.decoder is None:
        return None
    # The pickled form of a decoder is its JSON; that of the whole tokenizer holds the vocabulary.
    description: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    return description


class ByteDetokenizer:
    """Text from the bytes of tokens.

    Args:
        spelling: bytes of an id.
        prompt: ids before the output. They matter for one thing: whether the output's first token
            begins the text. A character that the prompt left unfinished is not completed.
        clean_up: replace as `CLEAN_UPS` say.
    """

    # __slots__, as in OutputStream: keeps the fields that every step touches close together.
    __slots__ = (
        "_begins",
        "_replacers",
        "_settled",
        "_spelled",
        "_spelling",
        "_strip",
        "_utf8",
    )

    def __init__(self, spelling: Spelling, prompt: Sequence[int] = (), clean_up: bool = False):
        self._spelling, self._spelled = spelling, spelling.spelled
        rules = spelling.rules
        self._begins = all(spelling.spell(token) is None for token in reversed(prompt))
        self._strip = rules.strip[1] if self._begins else 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")(rules.errors)
        # No character waits for its last byte.
        self._settled = True
        self._replacers = [_Replacer(*pair) for pair in CLEAN_UPS] if clean_up else []

    def push(self, *tokens: int) -> str:
        """See `Detokenizer`."""
        spell = self._spelling.spell
        if len(tokens) == 1 and not self._begins:
            # Fast path: one token whose text does not depend on its neighbours.
            token = tokens[0]
            part = self._spelled[token] if token in self._spelled else spell(token)
            if part is None:
                return ""
            text = part.decode() if self._settled and part.isascii() else self._decode(part)
            return self._settle(text) if self._strip or self._replacers else text
        parts = [part for token in tokens if (part := spell(token)) is not None]
        if self._begins and parts:
            first = next(token for token in tokens if spell(token) is not None)
            parts[0] = self._spelling.spell_first(first) or b""
            self._begins = False
        return self._settle(self._decode(b"".join(parts)))

    def flush(self) -> str:
        """See `Detokenizer`."""
        text = self._settle(self._utf8.decode(b"", final=True))
        for i, replacer in enumerate(self._replacers):
            rest = replacer.flush()
            for later in self._replacers[i + 1 :]:
                rest = later.push(rest)
            text += rest
        return text

    def _decode(self, part: bytes) -> str:
        text = self._utf8.decode(part)
        self._settled = not self._utf8.getstate()[0]
        return text

    def _settle(self, text: str) -> str:
        while self._strip and text:
            if text[0] != self._spelling.rules.strip[0]:
                self._strip = 0
            else:
                text = text[1:]
                self._strip -= 1
        for replacer in self._replacers:
            text = replacer.push(text)
        return text


class _Replacer:
    """`str.replace` on a text that comes in pieces; holds back what may become a match."""

    def __init__(self, old: str, new: str) -> None:
        self._old = old
        self._new = new
        self._held = ""

    def push(self, text: str) -> str:
        """The text so far that no later piece can change."""
        *done, rest = (self._held + text).split(self._old)
        sizes = range(min(len(self._old) - 1, len(rest)), 0, -1)
        held = next((n for n in sizes if rest.endswith(self._old[:n])), 0)
        settled = len(rest) - held
        self._held = rest[settled:]
        return self._new.join([*done, rest[:settled]])

    def flush(self) -> str:
        """What was held back."""
        held, self._held = self._held, ""
        return held


class WindowDetokenizer:
    """Text by the tokenizer's own decoder, for decoders whose tokens depend on their neighbours.

    Each piece is the difference of two decodings that begin at a token a little earlier. The text
    of an output is defined as its pieces joined.

    Args:
        decode: text of ids.
        hidden: an id that is no part of a text.
        prompt: ids before the output, context of the first piece.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        hidden: Callable[[int], bool],
        prompt: Sequence[int] = (),
    ) -> None:
        self._decode = decode
        self._hidden = hidden
        self._ids = [token for token in prompt[-WINDOW_CONTEXT:] if not hidden(token)]
        self._read = len(self._ids)
        self._before = decode(self._ids)

    def push(self, *tokens: int) -> str:
        """See `Detokenizer`."""
        return "".join([self._push(token) for token in tokens if not self._hidden(token)])

    def flush(self) -> str:
        """See `Detokenizer`."""
        return "" if self._read == len(self._ids) else self._advance(self._decode(self._ids))

    def _push(self, token: int) -> str:
        self._ids.append(token)
        text = self._decode(self._ids)
        unsettled = len(text) <= len(self._before) or text.endswith(REPLACEMENT)
        if unsettled and len(self._ids) - self._read < WINDOW_PENDING:
            return ""
        return self._advance(text)

    def _advance(self, text: str) -> str:
        piece = text[len(self._before) :]
        # Earlier ids are not decoded again; the new ones are the context of the next piece.
        del self._ids[: self._read]
        self._read = len(self._ids)
        self._before = self._decode(self._ids)
        return piece
