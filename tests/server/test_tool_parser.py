"""Tool calls: parsers at every split of the text, and the grammars that enforce calls."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.engine.grammar import GrammarCompiler, unpack
from cairn.errors import BadRequest
from cairn.server.tool_grammars import tool_grammar
from cairn.server.tool_parser import (
    CallArguments,
    CallBegin,
    CallEnd,
    Piece,
    Text,
    ToolParser,
    choose_parser,
)
from cairn.types import Grammar

Told = list[str | tuple[str, str]]


def parser(name: str, tools: list[str] | None = None) -> ToolParser:
    numbers = itertools.count()
    return ToolParser(name, tools, new_id=lambda: f"call_{next(numbers)}")


def told(pieces: list[Piece]) -> Told:
    """Joined texts, and (name, arguments) of the calls; checks the order of the pieces."""
    found: Told = []
    calls = -1
    for piece in pieces:
        match piece:
            case Text(text):
                assert text
                if found and isinstance(found[-1], str):
                    found[-1] += text
                else:
                    found.append(text)
            case CallBegin(index, name_of_call, name):
                calls += 1
                assert (index, name_of_call) == (calls, f"call_{calls}")
                found.append((name, ""))
            case CallArguments(index, fragment):
                assert index == calls
                last = found[-1]
                assert isinstance(last, tuple)
                found[-1] = (last[0], last[1] + fragment)
            case CallEnd(index):
                assert index == calls
    return found


def read(name: str, parts: list[str], tools: list[str] | None = None) -> Told:
    found = parser(name, tools)
    return told([piece for part in parts for piece in found.feed(part)] + found.close())


def call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


DEEP = '{"a": [{"b": "x}]</tool_call>\\"{"}, -1.50e3, 1e999], "é": "\\u00e9\\n"}'

HERMES: dict[str, tuple[str, Told]] = {
    "text": ("Just an answer, 1 < 2 and <tool> {}.", ["Just an answer, 1 < 2 and <tool> {}."]),
    "call": (call("f", '{"x": 1}'), [("f", '{"x": 1}')]),
    "deep arguments": (call("f", DEEP), [("f", DEEP)]),
    "tight": ('<tool_call>{"name":"f","arguments":{}}</tool_call>', [("f", "{}")]),
    "arguments first": (
        '<tool_call> {"arguments" : {"name": 1} , "name" : "f"} </tool_call>',
        [("f", '{"name": 1}')],
    ),
    "no arguments": ('<tool_call>{"name": "f"}</tool_call>', [("f", "{}")]),
    "text before": (f"Let me see.\n\n{call('f')}", ["Let me see.", ("f", "{}")]),
    "two calls": (f"{call('f')}\n{call('g')}\n", [("f", "{}"), ("g", "{}")]),
    "text between": (
        f" Hm. {call('f')} And\n{call('g')}\nDone. ",
        [" Hm.", ("f", "{}"), "And", ("g", "{}"), "Done. "],
    ),
    "space at the end of text": ("An answer. \n\n", ["An answer. \n\n"]),
    "bad JSON": (
        '<tool_call>\n{"name": "f", "arguments": {x}}\n</tool_call> so',
        ['<tool_call>\n{"name": "f", "arguments": {x}}\n</tool_call> so'],
    ),
    "bad, then good": (
        f"<tool_call>{{oops</tool_call>\n{call('f')}",
        ["<tool_call>{oops</tool_call>", ("f", "{}")],
    ),
    "tag in a tag": (f"<tool_call>{call('f')}", ["<tool_call>", ("f", "{}")]),
    "odd quote, then good": (
        f'<tool_call>"</tool_call>{call("f")}',
        ['<tool_call>"</tool_call>', ("f", "{}")],
    ),
    "not an object": ("<tool_call>[1]</tool_call>", ["<tool_call>[1]</tool_call>"]),
    "arguments no object": (
        '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
        ['<tool_call>{"name": "f", "arguments": "x"}</tool_call>'],
    ),
    "wrong closing tag": (
        f"{call('f')[:-12]}</tool_calls>",
        [f"{call('f')[:-12]}</tool_calls>"],
    ),
    "not closed": (call("f", DEEP).removesuffix("</tool_call>"), [("f", DEEP)]),
    "half closed": (f"So {call('f')[:-4]}", ["So", ("f", "{}")]),
    "not closed before the next": (
        f"{call('f')[:-12]}{call('g')} Hm {call('h')[:-12]}",
        [("f", "{}"), ("g", "{}"), "Hm", ("h", "{}")],
    ),
    "not closed, and text": (f"{call('f')[:-12]} So.", [f"{call('f')[:-12]} So."]),
    "two in a tag": (
        '<tool_call>{"name": "f"}\n{"name": "g", "arguments": {"a": [1]}}</tool_call>',
        [("f", "{}"), ("g", '{"a": [1]}')],
    ),
    "list": (
        '<tool_call>[{"name": "f", "arguments": {"a": 1e2}},\n{"name": "g"}]</tool_call>.',
        [("f", '{"a": 1e2}'), ("g", "{}"), "."],
    ),
    "list, not closed": ('<tool_call> [{"name": "f"}]', [("f", "{}")]),
    "list with a wrong one": (
        '<tool_call>[{"name": "f"}, {"x": 1}]</tool_call>',
        ['<tool_call>[{"name": "f"}, {"x": 1}]</tool_call>'],
    ),
    "empty list": ("<tool_call>[]</tool_call>", ["<tool_call>[]</tool_call>"]),
    "call as a text": (
        f"<tool_call>{json.dumps(json.dumps({'name': 'f', 'arguments': {'a': '</tool_call>'}}))}"
        "</tool_call>",
        [("f", '{"a": "</tool_call>"}')],
    ),
    "NaN": (
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        [("f", '{"a": NaN}')],
    ),
    "cut off": (f"So {call('f')[:40]}", [f"So {call('f')[:40]}"]),
    "cut in the tag": ("So <tool_ca", ["So <tool_ca"]),
    "cut after a call": (f"{call('f')}\n<tool_", [("f", "{}"), "<tool_"]),
    "cut in an escape": ('<tool_call>{"a": "\\', ['<tool_call>{"a": "\\']),
    "tag again and again": ("<tool_call><tool_call> <tool_", ["<tool_call><tool_call> <tool_"]),
    "closing tag alone": ("</tool_call>a", ["</tool_call>a"]),
    "too deep": (
        f"<tool_call>{'[' * 100}</tool_call>",
        [f"<tool_call>{'[' * 100}</tool_call>"],
    ),
    "nothing": ("", []),
}

LLAMA: dict[str, tuple[str, Told]] = {
    "text": ('An answer with {"name": "f"} in it.', ['An answer with {"name": "f"} in it.']),
    "call": ('{"name": "f", "parameters": {"x": "}"}}', [("f", '{"x": "}"}')]),
    "space around": (' \n{"name": "f", "parameters": {}}\n', [("f", "{}")]),
    "tag": ('<|python_tag|> {"name": "f", "parameters": {}}', [("f", "{}")]),
    "function": (
        '{"type": "function", "function": "f", "parameters": {"a": [1]}}',
        [("f", '{"a": [1]}')],
    ),
    "arguments": ('{"name": "f", "arguments": {"a": {}}}', [("f", '{"a": {}}')]),
    "several": (
        '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"b": 2}}',
        [("f", "{}"), ("g", '{"b": 2}')],
    ),
    "text after": ('{"name": "f", "parameters": {}} Done.', [("f", "{}"), "Done."]),
    "JSON answer": ('{"answer": {"name": "f"}}', ['{"answer": {"name": "f"}}']),
    "empty object": ("{ } is empty", ["{ } is empty"]),
    "brace": ("{x}", ["{x}"]),
    "long key": ('{"namesake": 1}', ['{"namesake": 1}']),
    "wrong type": ('{"name": 3, "parameters": {}}', ['{"name": 3, "parameters": {}}']),
    "bad JSON": ('{"name": "f", "parameters": {x}} y', ['{"name": "f", "parameters": {x}} y']),
    "cut off": (' {"name": "f", "param', [' {"name": "f", "param']),
    "code": ("<|python_tag|>print(1)", ["<|python_tag|>print(1)"]),
    "cut in the tag": ("<|pyth", ["<|pyth"]),
    "list": (
        '[{"name": "f", "parameters": {"a": []}}, {"name": "g"}]',
        [("f", '{"a": []}'), ("g", "{}")],
    ),
    "list of other things": ('[{"answer": 1}]', ['[{"answer": 1}]']),
    "list of numbers": ("[1, 2]", ["[1, 2]"]),
    "empty list": ("[ ]", ["[ ]"]),
    "unknown key": ('{"name": "f", "inputs": {}}', ['{"name": "f", "inputs": {}}']),
    "call and wrong call": (
        '{"name": "f", "parameters": {}};{"x": 1}',
        [("f", "{}"), ';{"x": 1}'],
    ),
    "nothing": ("", []),
}

CASES = [
    pytest.param(name, text, expected, id=f"{name}-{case}")
    for name, cases in (("hermes", HERMES), ("llama3_json", LLAMA))
    for case, (text, expected) in cases.items()
]


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_calls_are_found_at_every_split(name: str, text: str, expected: Told) -> None:
    assert read(name, [text]) == expected
    assert read(name, list(text)) == expected
    for i in range(len(text) + 1):
        assert read(name, [text[:i], text[i:]]) == expected
        assert read(name, [text[: i // 2], text[i // 2 : i], "", text[i:]]) == expected


SNIPPETS = (
    "[", "]", ",", '{"name": "f"}',
    "<tool_call>", "</tool_call>", "<tool", "_call>", '{"name": "f", "arguments": {"a": "b"}}',
    '{"name": "f", "parameters": {}}', "{", "}", '"', "\\", "\n", " ", ";", "word", '{"name"',
    "<|python_tag|>", call("g"),
)  # fmt: skip


@settings(max_examples=400)
@given(
    parts=st.lists(st.sampled_from(SNIPPETS), max_size=9),
    cuts=st.lists(st.integers(0, 200), max_size=6),
    name=st.sampled_from(["hermes", "llama3_json"]),
)
def test_any_text_is_read_the_same_however_it_is_split(
    parts: list[str], cuts: list[int], name: str
) -> None:
    text = "".join(parts)
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    split = [text[a:b] for a, b in itertools.pairwise(borders)]
    whole = read(name, [text])
    assert read(name, split) == whole
    assert read(name, list(text)) == whole
    if all(isinstance(part, str) for part in whole):
        assert "".join(part for part in whole if isinstance(part, str)) == text
    for part in whole:
        if isinstance(part, tuple):
            assert isinstance(json.loads(part[1]), dict)


@pytest.mark.parametrize("name", ["hermes", "llama3_json"])
def test_only_the_tools_given_are_called(name: str) -> None:
    key = "arguments" if name == "hermes" else "parameters"
    texts = [f'{{"name": "{tool}", "{key}": {{}}}}' for tool in ("f", "g")]
    if name == "hermes":
        texts = [f"<tool_call>{text}</tool_call>" for text in texts]
    assert read(name, [texts[0]], tools=["f"]) == [("f", "{}")]
    assert read(name, [texts[1]], tools=["f"]) == [texts[1]]


@pytest.mark.parametrize(
    ("members", "arguments"),
    [
        ('"name": "f", "parameters": {"a": 1}', '{"a": 1}'),
        ('"function": "f", "arguments": {"a": 1}', '{"a": 1}'),
        ('"name": "f", "function": "f", "arguments": {"a": 1}', '{"a": 1}'),
        ('"name": "f", "arguments": {}, "parameters": {"a": 1}', '{"a": 1}'),
        ('"name": "f", "arguments": {"a": 1}, "parameters": {"a": 1}', '{"a": 1}'),
        ('"name": "f", "arguments": {"a": 1}, "id": "x", "thought": "y"', '{"a": 1}'),
        ('"name": "f", "arguments": "{\\"a\\":  1e2}"', '{"a":  1e2}'),
        ('"name": "f", "parameters": "{}"', "{}"),
        ('"name": "f", "arguments": ""', "{}"),
        ('"name": "f", "arguments": null', "{}"),
        ('"name": "f", "type": "function"', "{}"),
        ('"type": "function", "function": {"name": "f", "arguments": {"a": 1}}', '{"a": 1}'),
        ('"id": "x", "function": {"name": "f", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
    ],
)
@pytest.mark.parametrize("name", ["hermes", "llama3_json"])
def test_arguments_under_the_keys_of_other_forms(name: str, members: str, arguments: str) -> None:
    text = f"<tool_call>{{{members}}}</tool_call>" if name == "hermes" else f"{{{members}}}"
    expected = [("f", arguments)]
    if name == "llama3_json" and members.startswith('"id"'):
        # An answer that begins like this is streamed as text.
        expected = [text]
    assert read(name, [text]) == expected


@pytest.mark.parametrize(
    "members",
    [
        *(f'"name": "f", "{key}": {{"a": 1}}' for key in ("args", "input", "params", "Arguments")),
        '"name": "f", "a": 1',
        '"name": "f", "id": 7',
        '"name": "f", "type": "cat"',
        '"name": "f", "arguments": null, "args": {"a": 1}',
        '"name": "f", "function": "g", "arguments": {}',
        '"name": "f", "arguments": [1]',
        '"name": "f", "arguments": "[1]"',
        '"name": "f", "arguments": "{\\"a\\": "',
        '"name": "f", "arguments": "{\\"a\\": NaN}"',
        '"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"',
        '"function": {"name": "f"}, "arguments": {"a": 1}',
        '"arguments": {"a": 1}',
    ],
)
@pytest.mark.parametrize("name", ["hermes", "llama3_json"])
def test_arguments_never_vanish(name: str, members: str) -> None:
    text = f"<tool_call>{{{members}}}</tool_call>" if name == "hermes" else f"{{{members}}}"
    assert read(name, [text]) == [text]


@pytest.mark.parametrize("name", ["hermes", "llama3_json"])
def test_arguments_of_two_kinds_are_no_json(name: str) -> None:
    text = '{"name": "f", "arguments": {"a": 1}, "parameters": {"a": 2}}'
    text = f"<tool_call>{text}</tool_call>" if name == "hermes" else text
    (made,) = read(name, [text])
    assert '"a": 1' in made[1] and '"a": 2' in made[1]
    with pytest.raises(ValueError):
        json.loads(made[1])


@pytest.mark.parametrize("text", ["", call("g") + " Hm\n"])
def test_an_answer_that_was_cut_off_ends_in_no_call(text: str) -> None:
    cut = call("f").removesuffix("</tool_call>")
    found = parser("hermes")
    pieces = found.feed(text + cut) + found.close(complete=False)
    assert told(pieces)[-1] == (f"Hm\n{cut}" if text else cut)
    other = parser("hermes")
    pieces = other.feed(text + cut[:-4]) + other.close(complete=True)
    assert isinstance(told(pieces)[-1], str)


def test_no_markup_leaks_while_a_call_is_written() -> None:
    found = parser("hermes")
    shown = []
    for character in f"Yes.\n{call('f', DEEP)}":
        shown += [piece for piece in found.feed(character) if isinstance(piece, Text)]
    assert "".join(piece.text for piece in shown) == "Yes."


def test_text_is_told_as_soon_as_it_can_be_no_call() -> None:
    found = parser("hermes")
    assert found.feed("abc <tool") == [Text("abc")]
    assert found.feed("box") == [Text(" <toolbox")]
    other = parser("llama3_json")
    assert other.feed('{"answ') == [Text('{"answ')]
    assert other.feed("er") == [Text("er")]


def test_every_call_has_an_id_of_its_own() -> None:
    found = ToolParser("hermes")
    pieces = found.feed(call("f") + call("f")) + found.close()
    ids = [piece.id for piece in pieces if isinstance(piece, CallBegin)]
    assert len(set(ids)) == 2 and all(one.startswith("call_") for one in ids)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("{{ '<|python_tag|>' }}", "llama3_json"),
        ('{# ipython #} {"name": x, "parameters": y}', "llama3_json"),
    ],
)
def test_the_template_names_the_parser(template: str, expected: str) -> None:
    assert choose_parser("auto", template) == expected
    assert choose_parser("hermes", template) == "hermes"
    assert choose_parser("llama3_json", None) == "llama3_json"


def test_without_a_known_format_tools_are_refused() -> None:
    with pytest.raises(BadRequest, match="--tool-parser"):
        choose_parser("auto", "{{ tools }}{{ messages }}")
    assert choose_parser("hermes", "{{ tools }}{{ messages }}") == "hermes"


def test_a_template_without_a_place_for_tools() -> None:
    with pytest.raises(BadRequest, match="does not support tools.*Leave tools out"):
        choose_parser("auto", "{{ messages }} toolset")


def test_the_plain_template_has_the_form_of_hermes() -> None:
    assert choose_parser("auto", None) == "hermes"
    assert choose_parser("llama3_json", None) == "llama3_json"


WEATHER = {
    "type": "function",
    "function": {
        "name": 'get "weather"',
        "parameters": {
            "properties": {"city": {"$ref": "#/$defs/city"}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"city": {"enum": ["Rome", "Oslo\n"]}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
END = 0


def takes(compiler: GrammarCompiler, grammar: Grammar, text: str) -> bool:
    state = compiler.compile(grammar, [END])
    for byte in text.encode():
        if byte not in np.flatnonzero(unpack(state.mask())):
            return False
        state.accept(byte)
    return state.done or END in np.flatnonzero(unpack(state.mask()))


def written(name: str, tool: str, arguments: str) -> str:
    key = "arguments" if name == "hermes" else "parameters"
    text = f'{{"name": {json.dumps(tool)}, "{key}": {arguments}}}'
    return f"<tool_call>\n{text}\n</tool_call>" if name == "hermes" else text


@pytest.mark.parametrize("name", ["hermes", "llama3_json"])
def test_a_required_call_is_one_of_the_tools(compiler: GrammarCompiler, name: str) -> None:
    grammar = tool_grammar([WEATHER, CLOCK], "required", name)
    assert grammar is not None
    rome = written(name, 'get "weather"', '{"city": "Rome"}')
    oslo = written(name, 'get "weather"', '{\n  "city": "Oslo\\n"\n}')
    clock = written(name, "clock", "{}")
    for text in (rome, oslo, clock):
        assert takes(compiler, grammar, text), text
        (found,) = read(name, [text], ['get "weather"', "clock"])
        assert isinstance(found, tuple)
    for text in (
        "Hello",
        written(name, 'get "weather"', "{}"),
        written(name, 'get "weather"', '{"city": "Bern"}'),
        written(name, "clock", '{"city": "Rome"}'),
        written(name, "other", "{}"),
        rome + clock,
    ):
        assert not takes(compiler, grammar, text), text


@pytest.mark.parametrize("name", ["hermes", "llama3_json"])
def test_a_named_call_is_that_one(compiler: GrammarCompiler, name: str) -> None:
    grammar = tool_grammar([WEATHER, CLOCK], "clock", name, several=True)
    assert grammar is not None
    clock = written(name, "clock", "{}")
    assert takes(compiler, grammar, clock)
    for between in ("", "\n", "; "):
        assert not takes(compiler, grammar, clock + between + clock)
    assert not takes(compiler, grammar, written(name, 'get "weather"', '{"city": "Rome"}'))
    with pytest.raises(BadRequest, match="'cloc'"):
        tool_grammar([WEATHER, CLOCK], "cloc", name)


@pytest.mark.parametrize(("name", "between"), [("hermes", "\n"), ("llama3_json", "; ")])
def test_several_calls_may_follow(compiler: GrammarCompiler, name: str, between: str) -> None:
    grammar = tool_grammar([WEATHER, CLOCK], "required", name, several=True)
    assert grammar is not None
    text = between.join([written(name, "clock", "{}")] * 3)
    assert takes(compiler, grammar, text)
    assert read(name, [text]) == [("clock", "{}")] * 3


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("name", ["hermes", "llama3_json"])
def test_calls_or_an_answer(compiler: GrammarCompiler, name: str, several: bool) -> None:
    answer = {"type": "object", "properties": {"x": {"const": 1}}, "required": ["x"]}
    answer["properties"]["name"] = {"$ref": "#/$defs/city"}
    answer["$defs"] = {"city": {"type": "null"}}
    drafted = WEATHER["function"]["parameters"] | {
        "$schema": "http://json-schema.org/draft-07/schema#"
    }
    weather = {"function": WEATHER["function"] | {"parameters": drafted}}
    grammar = tool_grammar([weather, CLOCK], "required", name, several=several, answer=answer)
    assert grammar is not None
    clock = written(name, "clock", "{}")
    rome = written(name, 'get "weather"', '{"city": "Rome"}')
    for text in (clock, rome, '{"x": 1}', '{"x": 1, "name": null}', '{"x": 1, "y": []}'):
        assert takes(compiler, grammar, text), text
    between = "\n" if name == "hermes" else "; "
    assert takes(compiler, grammar, clock + between + rome) == several
    for text in (
        "Hello",
        '{"x": 2}',
        '{"x": 1, "name": 2}',
        '{"x": 1}' + between + clock,
        clock + between + '{"x": 1}',
        f"Let me see. {clock}",
        written(name, 'get "weather"', '{"city": "Bern"}').replace("name", "nome"),
    ):
        assert not takes(compiler, grammar, text), text


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_a_free_choice_needs_no_grammar(choice: str) -> None:
    assert tool_grammar([CLOCK], choice, "hermes") is None
