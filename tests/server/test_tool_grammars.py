"""Outputs that may contain calls whose arguments follow their schemas."""

from __future__ import annotations

import json

import numpy as np
import pytest

from cairn.engine.grammar import GrammarCompiler, Vocabulary, unpack
from cairn.server.tool_grammars import strict_grammar
from cairn.types import Grammar
from tests.server.test_tool_parser import read

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
LOOSE = {
    "type": "function",
    "function": {"name": 'say "it"', "parameters": {"properties": {"x": {"type": "integer"}}}},
}
EMPTY = {"type": "function", "function": {"name": "now", "strict": True}}
TOOLS = [ADD, LOOSE, EMPTY]
NAMES = [tool["function"]["name"] for tool in TOOLS]
END = 0
PIECES = (b"<tool", b"_call>", b">\n{", b'"}}', b'{"name": "', b'", "parameters": {"a', b"<<")


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(Vocabulary((*(bytes([i]) for i in range(256)), *PIECES)))


def takes(compiler: GrammarCompiler, grammar: Grammar, text: str) -> bool:
    """Whether the text, in the longest tokens possible, satisfies the grammar."""
    state, data = compiler.compile(grammar, [END]), text.encode()
    while data:
        token = next((256 + i for i, p in enumerate(PIECES) if data.startswith(p)), data[0])
        data = data[len(PIECES[token - 256]) if token > 255 else 1 :]
        if token not in np.flatnonzero(unpack(state.mask())):
            return False
        state.accept(token)
    return state.done or END in np.flatnonzero(unpack(state.mask()))


def hermes(name: str, arguments: str) -> str:
    text = f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}'
    return f"<tool_call>\n{text}\n</tool_call>"


def llama(name: str, arguments: str) -> str:
    return f'{{"name": {json.dumps(name)}, "parameters": {arguments}}}'


RIGHT = [("add", '{"a": 1, "b": 2}'), ('say "it"', '{"y": [true]}'), ("now", "{}")]
WRONG = [
    ("add", '{"a": 1}'),
    ("add", '{"a": 1, "b": "2"}'),
    ("add", '{"a": 1, "b": 2, "c": 3}'),
    ("add", "[]"),
    ("sub", "{}"),
    ("now", '{"a": 1}'),
    ('say "it"', "3"),
]
TEXTS = ["", "Hello.\n\n日本", "a < b", "<tool", "<tool_call", "</tool_call>", "<<tool", "[]", "{}"]


@pytest.mark.parametrize(("parser", "write"), [("hermes", hermes), ("llama3_json", llama)])
def test_calls_follow_their_schemas(compiler, parser, write):
    grammar = strict_grammar(TOOLS, parser)
    for text in TEXTS:
        assert takes(compiler, grammar, text), text
    for name, arguments in RIGHT:
        text = write(name, arguments)
        assert takes(compiler, grammar, text), text
        assert read(parser, [text], NAMES) == [(name, arguments)]
    for name, arguments in WRONG:
        assert not takes(compiler, grammar, write(name, arguments)), (name, arguments)


def test_hermes_calls_stand_anywhere_in_a_text(compiler):
    grammar = strict_grammar(TOOLS, "hermes")
    one, two = hermes(*RIGHT[0]), hermes(*RIGHT[2])
    for text in (f"Well: {one}", f"{one}\n{two}", f"a{one}b{two}c", f"<{one}", f"<tool_{one}"):
        assert takes(compiler, grammar, text), text
    for text in ("<tool_call>", f"{one}<tool_call> no", f"a <tool_call>{{}}</tool_call> {one}"):
        assert not takes(compiler, grammar, text), text


def test_llama_answers_that_begin_like_a_call_are_one(compiler):
    grammar = strict_grammar(TOOLS, "llama3_json")
    call = llama(*RIGHT[0])
    for text in (
        f"{call}; {llama(*RIGHT[1])}",
        f" <|python_tag|> {call}",
        '{"type": "function", "name": "add", "parameters": {"a": 1, "b": 2}}',
        '{"parameters": {"a": 1, "b": 2}, "name": "add"}',
        f"[{call}, {llama(*RIGHT[2])}]",
        '[ {"type": "function", "name": "add", "parameters": {"a": 1, "b": 2}}]',
    ):
        assert takes(compiler, grammar, text), text
        found = [piece for piece in read("llama3_json", [text], NAMES) if isinstance(piece, tuple)]
        assert found[0] == RIGHT[0]
    for text in ('{"names": 1}', '{"x": {"name": 1}}', "It is {}.", '{"nam', '[{"x": 1}]'):
        assert takes(compiler, grammar, text), text
        assert read("llama3_json", [text], NAMES) == [text]
    wrong = '{"parameters": {"a": 1}, "name": "add"}'
    for text in (f"{call} more", wrong, f"[{wrong}]", f"[{call}, {wrong}]", '{ "name": 3}'):
        assert not takes(compiler, grammar, text), text
