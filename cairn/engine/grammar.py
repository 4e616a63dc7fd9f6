"""Grammars as masks over the vocabulary: JSON schemas, regular expressions, EBNF.

llguidance parses; here a text becomes its grammar, the limits stand, and a state says which tokens
may follow. A mask allows every token whose bytes keep the output in the grammar, however it splits
the text. No torch: the API process compiles what clients send, in a process beside it, before the
engine sees it.
"""

from __future__ import annotations

import copy
import json
import random
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark
from numpy.typing import NDArray

from cairn.engine.schema import prepared
from cairn.errors import BadRequest, InvariantError
from cairn.types import Grammar

MAX_TEXT = 1 << 20
"""Characters of a schema, expression or grammar."""
MAX_LEAST = 1 << 20
"""Items, characters or members that a schema may ask for at least."""
JSON_WHITESPACE = r"( |\r?\n[ \t]{0,40})"
"""Between the tokens of a JSON text: nothing, a space, or a line break with its indent. Free
whitespace would let a model write blanks for ever."""
STACK_BYTES = 256 << 20
"""Address space; memory is taken as deep as the stack goes."""
CACHE_SIZE = 64
"""Compiled grammars that are kept."""
PROBE_TOKENS = 48
PROBE_SECONDS = 0.25
MAX_MESSAGE = 400
DEAD_END = "no token can continue the output"

# Computing a mask takes at most about 15 ms of a core, and a matcher's lexer about 50 MB.
_LIMITS = {"step_lexer_fuel": 200_000, "step_max_items": 50_000, "max_lexer_states": 50_000}
# Forcing the one possible continuation would need the tokenizer's own splitting of it.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'
_RULE_OPTION = re.compile(
    r"(?m)^\s*[?!]?[A-Za-z_][\w-]*\s*\[[^\]\n]*\b(max_tokens|temperature|stop)\s*="
)
_LOCATION = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
_LEAST = ("minLength", "minItems", "minProperties")
_DATA = ("const", "enum", "default", "examples")
_KIND_NAMES = {"json_schema": "JSON schema", "regex": "regular expression", "ebnf": "grammar"}

Words = NDArray[np.int32]


class TokenTable(Protocol):
    """The part of a tokenizer that grammars need."""

    def token_bytes(self, token: int) -> bytes:
        """Bytes of an id; empty for an id without a token."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that are no part of a text."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The bytes of every token.

    Attributes:
        tokens: bytes by id; empty for an id that spells nothing.
        special_ids: ids that are no part of a text: no grammar allows them unless it names them.
    """

    tokens: tuple[bytes, ...]
    special_ids: tuple[int, ...] = ()

    @classmethod
    def read(cls, table: TokenTable, vocab_size: int) -> Vocabulary:
        """The ids below `vocab_size` of a tokenizer."""
        tokens = tuple(table.token_bytes(token) for token in range(vocab_size))
        special = tuple(sorted(token for token in table.special_ids if token < vocab_size))
        return cls(tokens, special)


class GrammarState:
    """The state of one output in its grammar. Made by `GrammarCompiler.compile`.

    Args:
        matcher: at the point reached.
        vocab_size: ids of the model; the matcher's end sign is the id after the last.
        end_ids: ids that end the output; allowed where the grammar may end.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, end_ids: Iterable[int] = ()) -> None:
        self.done = False
        """The output is complete and nothing may follow."""
        self.error: str | None = None
        """Why no token can be chosen any more."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._ends = _bits(end_ids, vocab_size)
        self._end_sign = divmod(vocab_size, 32)
        self._mask = self._find_mask()

    def mask(self) -> Words:
        """Which tokens may follow: bit b of word w stands for token 32 * w + b. [ceil(V / 32)]

        An array is never written again once it was returned.
        """
        return self._mask

    def masks_along(self, guesses: Iterable[int]) -> list[Words]:
        """`mask`, and what it would be behind each of these tokens, up to one that is not allowed
        or that ends the output."""
        state, found = copy.copy(self), [self._mask]
        state._matcher = self._matcher.deep_copy()
        for token in guesses:
            state.accept(token)
            if state.error is not None or state.done:
                break
            found.append(state._mask)
        return found

    def accept(self, token: int) -> None:
        """Advance by one token. A token that the mask does not allow puts the state into an
        error."""
        if self.error is None and not self._matcher.consume_token(token):
            self._fail()
        self._mask = self._find_mask()

    def _find_mask(self) -> Words:
        """The mask of the point reached; `done` and `error` with it."""
        words = np.zeros(self._vocab_size // 32 + 1, dtype=np.int32)
        allowed = words[: len(self._ends)]
        if self.error is not None:
            return allowed
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            self._fail()
            return np.zeros_like(self._ends)
        word, bit = self._end_sign
        if int(words[word]) >> bit & 1:
            words.view(np.uint32)[word] ^= np.uint32(1 << bit)
            self.done = not allowed.any()
            allowed |= self._ends
        return allowed

    def _fail(self) -> None:
        message = self._matcher.get_error()
        self.error = DEAD_END if message.startswith("NoExtensionBias") else _shortened(message)


class GrammarCompiler:
    """Compiles grammars for one vocabulary. Used by one thread at a time.

    Compiling follows a chain of rules or references by recursion: a long one needs a deep stack,
    and too short a stack ends the process. `GrammarLoader` has a deep one.

    Args:
        vocabulary: the tokens.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocab_size = len(vocabulary.tokens)
        # The end-of-sequence id is one that no model has: the request decides which ids end an
        # output.
        self._tokenizer = LLTokenizer(_Wrapper(vocabulary), eos_token=[self.vocab_size])
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()

    def compile(self, grammar: Grammar, end_ids: Iterable[int] = ()) -> GrammarState:
        """A grammar at its beginning.

        Args:
            grammar: what the output must look like.
            end_ids: ids that end the output; allowed where the grammar may end. Without any, an
                output ends where nothing may follow.

        Raises:
            BadRequest: the grammar is wrong, too large or too complex, or allows no output.
        """
        matcher = self._compiled.get(grammar)
        if matcher is None:
            matcher = self._compiled[grammar] = self._build(grammar)
            if len(self._compiled) > CACHE_SIZE:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return self._begin(grammar, matcher.deep_copy(), end_ids)

    def probe(self, grammar: Grammar) -> None:
        """Compile a grammar, take a short random walk through it, and forget it.

        Some grammars compile in no time and then exceed the limits after a few tokens.

        Raises:
            BadRequest: as `compile`; also when the walk meets a limit.
        """
        state = self._begin(grammar, self._build(grammar), ())
        draw = random.Random(0)
        until = time.monotonic() + PROBE_SECONDS
        for _ in range(PROBE_TOKENS):
            if state.done or state.error is not None or time.monotonic() > until:
                break
            allowed = np.flatnonzero(unpack(state.mask()))
            state.accept(int(allowed[draw.randrange(len(allowed))]))
        # A dead end is on one of many paths: other outputs may avoid it.
        if state.error != DEAD_END:
            _check(grammar, state)

    def _build(self, grammar: Grammar) -> LLMatcher:
        limits = LLParserLimits(verbose_errors=False, **_LIMITS)
        matcher = LLMatcher(self._tokenizer, lark_text(grammar), log_level=0, limits=limits)
        if matcher.is_error():
            message = _plain(_shortened(matcher.get_error()))
            if grammar.kind != "ebnf":
                message = _LOCATION.sub("", message)
            raise refused(grammar, message)
        return matcher

    def _begin(self, grammar: Grammar, matcher: LLMatcher, end_ids: Iterable[int]) -> GrammarState:
        state = GrammarState(matcher, self.vocab_size, end_ids)
        _check(grammar, state)
        if state.done:
            raise refused(grammar, "only an empty output satisfies it")
        return state


class GrammarLoader:
    """Compiles beside the engine's loop: one thread, started by the first grammar.

    Args:
        table: the tokenizer.
        vocab_size: ids of the model.
    """

    def __init__(self, table: TokenTable, vocab_size: int) -> None:
        self._table = table
        self._vocab_size = vocab_size
        self._compiler: GrammarCompiler | None = None
        self._thread: ThreadPoolExecutor | None = None

    def submit(self, grammar: Grammar, end_ids: Sequence[int] = ()) -> Future[GrammarState]:
        """As `GrammarCompiler.compile`, in the thread."""
        if self._thread is None:
            self._thread = _deep_thread()
        return self._thread.submit(self._compile, grammar, end_ids)

    def compile(self, grammar: Grammar, end_ids: Sequence[int] = ()) -> GrammarState:
        """As `submit`, and wait for it."""
        return self.submit(grammar, end_ids).result()

    def _compile(self, grammar: Grammar, end_ids: Sequence[int]) -> GrammarState:
        if self._compiler is None:
            self._compiler = GrammarCompiler(Vocabulary.read(self._table, self._vocab_size))
        return self._compiler.compile(grammar, end_ids)


def _deep_thread() -> ThreadPoolExecutor:
    """A thread whose stack holds the longest chain of rules that MAX_TEXT allows."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="cairn-grammar")
    before = threading.stack_size(STACK_BYTES)
    try:
        # A thread gets its stack when it starts, and it starts with its first work.
        thread.submit(int)
    finally:
        threading.stack_size(before)
    return thread


def lark_text(grammar: Grammar) -> str:
    """The grammar in llguidance's dialect of Lark.

    Raises:
        BadRequest: the text is too long, no Unicode, no JSON, or of neither form of EBNF.
    """
    check_text(grammar)
    text = _ebnf(grammar) if grammar.kind == "ebnf" else f"start: {rule_of(grammar)}"
    return text + _OPTIONS


def rule_of(grammar: Grammar) -> str:
    """The right side of the rule that a JSON schema or an expression is.

    Raises BadRequest for a schema that is no JSON.
    """
    if grammar.kind == "json_schema":
        return json_rule(_load_schema(grammar))
    return f"/{regex_to_lark(grammar.text, 'd')}/"


def check_text(grammar: Grammar) -> None:
    """Raise BadRequest for a text that is too long or no Unicode: what needs no compiler."""
    if len(grammar.text) > MAX_TEXT:
        raise refused(grammar, f"it has {len(grammar.text)} characters, more than {MAX_TEXT}")
    try:
        grammar.text.encode()
    except UnicodeEncodeError as error:
        reason = f"it has half a surrogate pair at character {error.start}"
        raise refused(grammar, reason) from None


def json_rule(schema: Any) -> str:
    """The right side of a Lark rule that a JSON schema (a parsed one) describes.

    Raises BadRequest as `prepared`.
    """
    schema = {} if schema is True else prepared(schema)
    if isinstance(schema, dict):
        options = schema.get("x-guidance", {})
        if isinstance(options, dict) and not options.keys() & _WHITESPACE_OPTIONS:
            schema = {**schema, "x-guidance": {"whitespace_pattern": JSON_WHITESPACE, **options}}
    return f"%json {json.dumps(schema)}"


_WHITESPACE_OPTIONS = {"whitespace_pattern", "whitespace_flexible"}


def unpack(mask: Words) -> NDArray[np.uint8]:
    """A mask as one number per token, 1: allowed. [W] -> [32 * W]"""
    return np.unpackbits(mask.astype("<i4").view(np.uint8), bitorder="little")


def _load_schema(grammar: Grammar) -> Any:
    def no_number(name: str) -> None:
        raise ValueError(f"{name} is not a JSON number")

    try:
        schema = json.loads(grammar.text, parse_constant=no_number)
    except RecursionError:
        raise refused(grammar, "it is nested too deeply") from None
    except ValueError as error:
        raise refused(grammar, f"it is not JSON: {error}") from None
    _check_least(grammar, schema)
    return schema


def _check_least(grammar: Grammar, schema: Any) -> None:
    """Refuse what would have to be longer than any output."""
    left = [schema]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        elif isinstance(value, dict):
            for name in _LEAST:
                least = value.get(name)
                if isinstance(least, int | float) and least > MAX_LEAST:
                    raise refused(grammar, f"{name} is {least}, more than {MAX_LEAST}")
            left += (item for key, item in value.items() if key not in _DATA)


def _ebnf(grammar: Grammar) -> str:
    option = _RULE_OPTION.search(grammar.text)
    if option is not None:
        raise refused(grammar, f"the rule option {option[1]!r} is not supported")
    try:
        text: str = any_to_lark(grammar.text)
    except RecursionError:
        raise refused(grammar, "it is nested too deeply") from None
    except Exception as error:  # noqa: BLE001 - the converter raises bare ones for bad grammars
        raise refused(
            grammar, f"{error} (a Lark grammar has a rule `start:`, a GBNF one `root ::=`)"
        ) from None
    return text


class _Wrapper:
    """A vocabulary with the interface that llguidance expects."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = len(vocabulary.tokens)
        self.tokens = [*vocabulary.tokens, b"<end>"]
        self.special_token_ids = [*vocabulary.special_ids, self.eos_token_id]

    def __call__(self, text: bytes) -> list[int]:
        """Only forced text is ever split, and nothing is forced."""
        raise InvariantError(f"llguidance wants {text[:80]!r} split into tokens")


def _bits(tokens: Iterable[int], vocab_size: int) -> Words:
    """A mask with the bits of `tokens`."""
    words = np.zeros((vocab_size + 31) // 32, dtype=np.uint32)
    for token in tokens:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words.view(np.int32)


def _shortened(message: str) -> str:
    """One line of llguidance's message: without backtraces and excerpts of the grammar."""
    lines = []
    for line in message.splitlines():
        if re.match(r"\s*\d+ \| |<", line):
            break
        if line.startswith("error: "):
            return line.removeprefix("error: ")
        lines.append(line.strip())
    return " ".join(filter(None, lines))[:MAX_MESSAGE] or "it cannot be parsed"


def _plain(message: str) -> str:
    """llguidance's message, with its internal terms replaced by those of the request."""
    for beginning, words in _PLAIN_WORDS.items():
        at = message.find(beginning)
        if at >= 0:
            return message[:at] + words
    return message


_FAR_BOUND = (
    "a minimum of 1e18 or more needs a maximum below 2**63 beside it, a maximum of -1e18 or less a "
    "minimum above -2**63"
)
_PLAIN_WORDS = {
    "Failed to generate regex for integer range": _FAR_BOUND,
    "Failed to generate regex for float range": _FAR_BOUND,
    "oneOf constraints are not supported": "a value may satisfy several branches of a oneOf, or "
    "they cannot be shown to exclude each other; anyOf takes them",
}


def _check(grammar: Grammar, state: GrammarState) -> None:
    if state.error == DEAD_END:
        raise refused(grammar, "nothing satisfies it")
    if state.error is not None:
        raise refused(grammar, f"it is too complex: {state.error}")


def refused(grammar: Grammar, reason: str) -> BadRequest:
    """The error that says why a grammar cannot be used."""
    return BadRequest(f"the {_KIND_NAMES[grammar.kind]} cannot be used: {reason}")
