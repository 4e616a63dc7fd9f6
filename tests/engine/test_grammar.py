"""Masks of grammars, compared with enumerated languages."""

from __future__ import annotations

import itertools
import json
import random
import re

import numpy as np
import pytest

from cairn.engine.grammar import (
    MAX_TEXT,
    GrammarCompiler,
    GrammarLoader,
    GrammarState,
    Vocabulary,
    json_rule,
    lark_text,
    unpack,
)
from cairn.engine.tokenizer import Tokenizer
from cairn.errors import BadRequest
from cairn.types import Grammar
from tests.engine import vocabularies

END = 256
BYTES = Vocabulary((*(bytes([i]) for i in range(256)), b""))


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(BYTES)


def allowed(state: GrammarState) -> set[int]:
    return set(np.flatnonzero(unpack(state.mask())).tolist())


def feed(state: GrammarState, text: str) -> GrammarState:
    """Accept every byte of a text; each must be allowed by the mask."""
    for byte in text.encode():
        assert byte in allowed(state), (text, chr(byte))
        state.accept(byte)
    return state


def takes(compiler: GrammarCompiler, grammar: Grammar, text: str) -> bool:
    """Whether the whole text satisfies the grammar."""
    state = compiler.compile(grammar, end_ids=[END])
    for byte in text.encode():
        if byte not in allowed(state):
            return False
        state.accept(byte)
    return state.done or END in allowed(state)


def words_of(seed: int, size: int) -> tuple[bytes, ...]:
    """A vocabulary of single bytes and multi-byte tokens, some of them duplicate or empty."""
    draw = random.Random(seed)
    singles = [bytes([byte]) for byte in b"abc01"]
    longer = [bytes(draw.choices(b"abc01", k=draw.randint(2, 5))) for _ in range(size)]
    tokens = [*singles, *longer, b"ab", b"ab", b"", "é".encode()]
    draw.shuffle(tokens)
    return tuple(tokens)


LANGUAGES = {
    r"(ab|a)[01]{2}c?": {
        word + a + b + c for word, a, b, c in itertools.product(("ab", "a"), "01", "01", ("c", ""))
    },
    r"(a|b|c0|c01){2,4}": {
        "".join(parts)
        for count in (2, 3, 4)
        for parts in itertools.product(("a", "b", "c0", "c01"), repeat=count)
    },
}


@pytest.mark.parametrize("pattern", LANGUAGES)
@pytest.mark.parametrize("size", [3, 23, 24, 25, 120])
def test_the_mask_is_what_the_language_allows(pattern: str, size: int) -> None:
    language = [word.encode() for word in LANGUAGES[pattern]]
    tokens = words_of(size, size)
    vocabulary = Vocabulary(tokens)
    end = tokens.index(b"")
    start = GrammarCompiler(vocabulary)
    draw = random.Random(size)
    for _ in range(6):
        state, text = start.compile(Grammar("regex", pattern), [end]), b""
        while True:
            expected = {
                i
                for i, token in enumerate(tokens)
                if token and any(word.startswith(text + token) for word in language)
            }
            assert state.done == (not expected)
            if text in language:
                expected.add(end)
            assert allowed(state) == expected
            assert len(state.mask()) == (len(tokens) + 31) // 32
            if state.done:
                break
            token = draw.choice(sorted(expected - {end}))
            text += tokens[token]
            state.accept(token)
        assert text in language


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (Grammar("regex", r"a/b\d+"), ["a/b1", "a/b23"], ["a/b", "a/bx", "ab1", "a/b1 "]),
        (Grammar("regex", r"[\d.]+\D"), ["1.2x"], ["٣x", "1"]),
        (Grammar("regex", r"^\w+@x$"), ["é@x"], ["@x"]),
        (Grammar("regex", "a\n\"'b"), ["a\n\"'b"], ["a\"'b"]),
        (Grammar("regex", "(?i)yes|no"), ["YeS", "NO"], ["maybe"]),
        (Grammar("ebnf", 'start: "a" b\nb: "x"* | "y"'), ["a", "axx", "ay"], ["ayx", "b"]),
        (Grammar("ebnf", 'root ::= "a" b\nb ::= [x-z]{2} "/"?'), ["axz/", "ayy"], ["ax", "aw/"]),
        (Grammar("ebnf", 'start: %json {"type": "integer"}'), ["-12"], ["1.5", ""]),
        (Grammar("json_schema", "true"), ["[1]", "null", '"x"'], ["x", "[1"]),
        (
            Grammar("json_schema", '{"type": "object", "properties": {"a": {"$ref": "#"}}}'),
            ["{}", '{"a": {"a": {}}}'],
            ['{"a": 1}', "[]"],
        ),
    ],
)
def test_grammars_accept_and_reject(
    compiler: GrammarCompiler, grammar: Grammar, good: list[str], bad: list[str]
) -> None:
    for text in good:
        assert takes(compiler, grammar, text), text
    for text in bad:
        assert not takes(compiler, grammar, text), text


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "integer"}}, "b": {"type": "string"}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("value", [{"a": [1, 2, -3]}, {"a": [], "b": 'é"\\\n'}])
@pytest.mark.parametrize("form", [{}, {"indent": 2}, {"separators": (",", ":")}, {"indent": "\t"}])
def test_json_may_be_compact_spaced_or_indented(
    compiler: GrammarCompiler, value: object, form: dict[str, object]
) -> None:
    grammar = Grammar("json_schema", json.dumps(SCHEMA))
    assert takes(compiler, grammar, json.dumps(value, ensure_ascii=False, **form))


def test_json_white_space_comes_to_an_end(compiler: GrammarCompiler) -> None:
    state = feed(compiler.compile(Grammar("json_schema", json.dumps(SCHEMA))), "{")
    feed(state, "\n" + " " * 40)
    assert not allowed(state) & set(b" \t\r\n")
    own = {"x-guidance": {"whitespace_flexible": False}, **SCHEMA}
    assert not takes(compiler, Grammar("json_schema", json.dumps(own)), '{"a": []}')


def test_without_an_end_sign_an_output_ends_where_nothing_follows(
    compiler: GrammarCompiler,
) -> None:
    state = compiler.compile(Grammar("regex", "ab?c?"))
    assert allowed(state) == {ord("a")}
    feed(state, "a")
    assert allowed(state) == {ord("b"), ord("c")} and not state.done
    feed(state, "c")
    assert state.done and not allowed(state) and state.error is None


def test_end_ids_are_allowed_only_where_the_grammar_may_end(compiler: GrammarCompiler) -> None:
    state = compiler.compile(Grammar("regex", "ab?"), end_ids=[7, 255])
    assert allowed(state) == {ord("a")}
    assert allowed(feed(state, "a")) == {ord("b"), 7, 255}


def test_special_tokens_spell_nothing() -> None:
    tokens = (b"a", b"b", b"<x>", b"<y>")
    compiler = GrammarCompiler(Vocabulary(tokens, special_ids=(2,)))
    state = compiler.compile(Grammar("regex", "(?s:.)*"))
    assert allowed(state) == {0, 1, 3}
    named = compiler.compile(Grammar("ebnf", 'start: "a" <x>'))
    named.accept(0)
    assert allowed(named) == {2}


def test_states_of_one_grammar_are_apart(compiler: GrammarCompiler) -> None:
    grammar = Grammar("regex", "[ab]c")
    first, second = compiler.compile(grammar), compiler.compile(grammar)
    mask = first.mask()
    copy = mask.copy()
    feed(first, "a")
    assert allowed(first) == {ord("c")}
    assert allowed(second) == {ord("a"), ord("b")}
    assert np.array_equal(mask, copy), "a mask given away has changed"


def test_a_token_outside_the_grammar_is_an_error_of_the_state(compiler: GrammarCompiler) -> None:
    state = feed(compiler.compile(Grammar("regex", "abc")), "a")
    state.accept(ord("x"))
    assert state.error is not None and not state.done
    assert not allowed(state)
    state.accept(ord("b"))
    assert not allowed(state)


def test_a_dead_end_is_an_error_of_the_state() -> None:
    compiler = GrammarCompiler(Vocabulary((b"a", b"b")))
    state = compiler.compile(Grammar("regex", "a(cb|d)"))
    state.accept(0)
    assert state.error is not None and not state.done


@pytest.mark.parametrize("name", ["qwen", "llama", "gemma"])
def test_walks_over_whole_vocabularies_satisfy_the_grammar(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Multi-byte tokens, partial characters, special tokens: the grammar parses the ids' bytes."""
    folder = tmp_path_factory.mktemp(name)
    tokenizer = Tokenizer(getattr(vocabularies, name)(folder))
    size = tokenizer.size + 5
    compiler = GrammarCompiler(Vocabulary.read(tokenizer, size))
    end = max(tokenizer.special_ids)
    prompt = tokenizer.encode("Hello")
    schema = {"type": "object", "properties": {"é": {"type": "string", "maxLength": 9}}}
    closed = json.dumps({**schema, "required": ["é"], "additionalProperties": False})
    pattern = r"(the|a) [a-zé漢]{1,9}, \d{2,4}( 👍| <\|im_end\|>|)"
    draw = random.Random(name)
    lengths = set()
    for grammar in [Grammar("json_schema", closed), Grammar("regex", pattern)] * 25:
        state = compiler.compile(grammar, [end])
        stream, ids = tokenizer.detokenizer(prompt), []
        while not state.done and (not ids or ids[-1] != end):
            ids.append(draw.choice(sorted(allowed(state))))
            state.accept(ids[-1])
        assert not tokenizer.special_ids & set(ids[:-1])
        text = stream.push(*ids) + stream.flush()
        lengths.add(len(ids) / len(text.encode()))
        if grammar.kind == "regex":
            assert re.fullmatch(pattern, text), text
        else:
            value = json.loads(text)
            assert list(value) == ["é"] and len(value["é"]) <= 9
    assert min(lengths) < 1, "tokens of several bytes should be among them"


REFUSED = {
    "no JSON": (Grammar("json_schema", "{"), "it is not JSON"),
    "no schema": (Grammar("json_schema", "[]"), "schema must be an object"),
    "NaN": (Grammar("json_schema", "NaN"), "NaN is not a JSON number"),
    "unknown type": (Grammar("json_schema", '{"type": "text"}'), "Invalid type: text"),
    "unsupported": (Grammar("json_schema", '{"not": {}}'), "not has a form"),
    "false": (Grammar("json_schema", "false"), "Unsatisfiable"),
    "remote": (Grammar("json_schema", '{"$ref": "http://x/y"}'), "http://x/y"),
    "no such ref": (Grammar("json_schema", '{"$ref": "#/$defs/a"}'), "does not exist"),
    "half a pair": (Grammar("regex", "\ud800"), "half a surrogate pair"),
    "open group": (Grammar("regex", "a("), "unclosed group"),
    "look-around": (Grammar("regex", "(?=a)b"), "look-around"),
    "back reference": (Grammar("regex", r"(a)\1"), "backreferences"),
    "neither form": (Grammar("ebnf", "hello"), "`start:`"),
    "unknown rule": (Grammar("ebnf", "start: b"), 'unknown name: "b"'),
    "unknown GBNF rule": (Grammar("ebnf", "root ::= b"), "Rule 'b' not found"),
    "temperature": (Grammar("ebnf", 'start[temperature=0.5]: "a"'), "'temperature'"),
    "max_tokens": (Grammar("ebnf", 'start: b\n  b[max_tokens=3]: "a"'), "'max_tokens'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_grammar_is_refused_with_the_reason(compiler: GrammarCompiler, name: str) -> None:
    grammar, reason = REFUSED[name]
    with pytest.raises(BadRequest, match=re.escape(reason)) as caught:
        compiler.compile(grammar)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def nested(head: str, tail: str, depth: int) -> str:
    return head * depth + "{}" + tail * depth


BOMBS = {
    "deep items": Grammar("json_schema", nested('{"items":', "}", 50_000)),
    "deep properties": Grammar("json_schema", nested('{"properties":{"a":', "}}", 500)),
    "minLength": Grammar("json_schema", '{"type": "string", "minLength": 1000000000}'),
    "minItems": Grammar("json_schema", '{"properties": {"a": [{"minItems": 1e300}]}}'),
    "long": Grammar("json_schema", json.dumps({"enum": ["x" * MAX_TEXT]})),
    "$ref to itself": Grammar("json_schema", '{"$ref": "#"}'),
    "$ref in a ring": Grammar(
        "json_schema",
        '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}',
    ),
    "product": Grammar(
        "json_schema",
        json.dumps(
            {
                "allOf": [
                    {"anyOf": [{"properties": {f"{i}{j}": {"type": "string"}}} for j in range(9)]}
                    for i in range(9)
                ]
            }
        ),
    ),
    "multipleOf": Grammar("json_schema", '{"type": "integer", "multipleOf": 999999937}'),
    "repeated repeats": Grammar("regex", "((a{1,1000}){1,1000}){1,1000}"),
    "groups": Grammar("regex", "(" * 10_000 + "a" + ")" * 10_000),
    "Lark groups": Grammar("ebnf", "start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
    "GBNF groups": Grammar("ebnf", "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000),
    "ring": Grammar("ebnf", "start: a\na: b\nb: a"),
    "alternatives": Grammar(
        "ebnf",
        "start: " + " | ".join(f"r{i}" for i in range(3000)) + "\n"
        + "\n".join(f'r{i}: "x" "{i}"' for i in range(3000)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused(compiler: GrammarCompiler, name: str) -> None:
    with pytest.raises(BadRequest, match="cannot be used"):
        compiler.probe(BOMBS[name])


HARMLESS = {
    "large enum": Grammar("json_schema", json.dumps({"enum": [f"{i}" for i in range(50_000)]})),
    "catastrophic elsewhere": Grammar("regex", "(a*)*(a|a)*" * 20 + "b"),
    "subsets": Grammar("regex", "[ab]*a[ab]{200}"),
    "optional": Grammar("regex", "(a?){500}a{500}"),
    "maxLength": Grammar("json_schema", '{"type": "string", "maxLength": 2147483647}'),
    "maxItems": Grammar("json_schema", '{"type": "array", "maxItems": 1000000000}'),
    "minLength as data": Grammar("json_schema", '{"const": {"minLength": 1000000000}}'),
    "ambiguous": Grammar("ebnf", 'start: start start | "a" | ""'),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_grammars_that_resemble_bombs_are_served(
    compiler: GrammarCompiler, name: str
) -> None:
    compiler.probe(HARMLESS[name])


def test_json_rule_keeps_the_order_of_properties(compiler: GrammarCompiler) -> None:
    schema = {"type": "object", "properties": {"z": {"const": 1}, "a": {"const": 2}}}
    rule = json_rule({**schema, "required": ["z", "a"], "additionalProperties": False})
    grammar = Grammar("ebnf", f"start: {rule}")
    assert takes(compiler, grammar, '{"z": 1, "a": 2}')
    assert not takes(compiler, grammar, '{"a": 2, "z": 1}')


def test_nothing_can_follow_a_schema_in_its_rule() -> None:
    with pytest.raises(BadRequest, match="not JSON"):
        lark_text(Grammar("json_schema", '{}\nother: "x"'))


class Table:
    """A tokenizer of single bytes."""

    special_ids = frozenset({65})
    read = 0

    def token_bytes(self, token: int) -> bytes:
        self.read += 1
        return bytes([token])


def test_the_loader_reads_the_vocabulary_once_and_when_needed() -> None:
    table = Table()
    loader = GrammarLoader(table, 256)
    assert table.read == 0
    first = loader.submit(Grammar("regex", "[AB]"), [])
    second = loader.submit(Grammar("regex", "("), [])
    assert allowed(first.result()) == {66}
    assert isinstance(second.exception(), BadRequest)
    loader.compile(Grammar("regex", "a"))
    assert table.read == 256


def test_the_loader_follows_long_chains() -> None:
    loader = GrammarLoader(Table(), 256)
    rules = [f"a{i}: a{i + 1}" for i in range(20_000)]
    state = loader.compile(Grammar("ebnf", "\n".join(["start: a0", *rules, 'a20000: "x"'])))
    assert allowed(state) == {ord("x")}
