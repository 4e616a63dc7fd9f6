"""All formats of tool calls: parsed at every split, streamed as generated, enforced by a
grammar."""

from __future__ import annotations

import itertools
import json

import pytest

from cairn.engine.grammar import GrammarCompiler, Vocabulary
from cairn.server.tool_calls.formats import ALL, FORMS, NAMES
from cairn.server.tool_calls.values import json_value, kinds_of
from cairn.server.tool_grammars import strict_grammar, tool_grammar
from cairn.server.tool_parser import (
    CallArguments,
    CallBegin,
    CallEnd,
    Text,
    ToolParser,
    choose_parser,
)
from tests.server.test_tool_parser import Told, takes, told

FILE = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "lines": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "mode": {"enum": ["r", "w"]},
        "tags": {"$ref": "#/$defs/tags"},
    },
    "required": ["path"],
    "additionalProperties": False,
    "$defs": {"tags": {"type": "array", "items": {"type": "string"}}},
}
TOOLS = {"open": FILE, "now": {}}
WRITTEN = '{"path": "a\\n<b>", "lines": 3}'
TEXT = "a\n<b>"

SAMPLES: dict[str, tuple[str, str]] = {
    # A call of `open` with WRITTEN, followed by one of `now`.
    "hermes": (
        f'<tool_call>\n{{"name": "open", "arguments": {WRITTEN}}}\n</tool_call>',
        '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ),
    "llama3_json": (
        f'{{"name": "open", "parameters": {WRITTEN}}}',
        '; {"name": "now", "parameters": {}}',
    ),
    "qwen3_coder": (
        f"<tool_call>\n<function=open>\n<parameter=path>\n{TEXT}\n</parameter>\n"
        "<parameter=lines>\n3\n</parameter>\n</function>\n</tool_call>",
        "\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ),
    "mistral": (f"[TOOL_CALLS]open[ARGS]{WRITTEN}", "[TOOL_CALLS]now[ARGS]{}"),
    "mistral_list": (
        f'[TOOL_CALLS][{{"name": "open", "arguments": {WRITTEN}}}',
        ', {"name": "now", "arguments": {}}]',
    ),
    "deepseek_v3": (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>open\n```json\n{WRITTEN}\n```"
        "<｜tool▁call▁end｜>",
        "\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>open<｜tool▁sep｜>{WRITTEN}<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek_v32": (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="open">\n'
        f'<｜DSML｜parameter name="path" string="true">{TEXT}</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="lines" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>',
        '\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    ),
    "deepseek_v4": (
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="open">\n'
        f'<｜DSML｜parameter name="path" string="true">{TEXT}</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="lines" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>',
        '\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
    ),
    "pythonic": ('[open(path="a\\n<b>", lines=3)', ", now()]"),
}
NAMED = sorted(SAMPLES)


def read(name: str, parts: list[str], complete: bool = True) -> Told:
    numbers = itertools.count()
    found = ToolParser(name, TOOLS, new_id=lambda: f"call_{next(numbers)}")
    pieces = [piece for part in parts for piece in found.feed(part)]
    return told(pieces + found.close(complete))


def parsed(found: Told) -> list[object]:
    return [one if isinstance(one, str) else (one[0], json.loads(one[1])) for one in found]


def test_every_form_has_a_sample() -> None:
    assert set(SAMPLES) == set(FORMS)


@pytest.mark.parametrize("name", NAMED)
def test_two_calls_at_every_split(name: str) -> None:
    text = "".join(SAMPLES[name])
    expected = [("open", json.loads(WRITTEN)), ("now", {})]
    whole = read(name, [text])
    assert parsed(whole) == expected
    assert read(name, list(text)) == whole
    for i in range(len(text)):
        assert read(name, [text[:i], text[i:]]) == whole, i


# Mistral's newer format ends with the arguments.
@pytest.mark.parametrize("name", [n for n in NAMED if n != "mistral"])
def test_the_last_sign_may_be_missing(name: str) -> None:
    text = "".join(SAMPLES[name])[:-1]
    whole = read(name, [text])
    assert parsed(whole) == [("open", json.loads(WRITTEN)), ("now", {})]
    assert read(name, list(text)) == whole
    assert read(name, [text], complete=False) != whole or text[-1] != "}"


@pytest.mark.parametrize("name", [n for n in NAMED if n not in ("llama3_json", "pythonic")])
def test_text_around_calls_stays(name: str) -> None:
    calls = "".join(SAMPLES[name])
    for text in (f"Let me see.\n\n{calls}", f"{calls}\nDone."):
        whole = read(name, [text])
        assert read(name, list(text)) == whole
        assert len(whole) == 3
        assert {"Let me see.", "Done."} & set(whole)


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize(
    "text", ["An answer, 1 < 2 [x].", "<too", "[TOOL", "[", "", "[1, 2]", "<tool_call>x", "f(a=1)"]
)
def test_malformed_calls_are_text(name: str, text: str) -> None:
    assert "".join(map(str, read(name, [text]))) == text
    assert "".join(map(str, read(name, list(text)))) == text


@pytest.mark.parametrize("name", NAMED)
def test_an_unknown_function_is_text(name: str) -> None:
    text = SAMPLES[name][0].replace("open", "shut") + ("]" if name == "pythonic" else "")
    found = read(name, [text])
    assert all(isinstance(part, str) for part in found)
    assert "".join(map(str, found)) == text
    assert "".join(map(str, read(name, list(text)))) == text


@pytest.mark.parametrize("name", [n for n in NAMED if n not in ("mistral_list", "pythonic")])
def test_arguments_are_told_while_they_are_written(name: str) -> None:
    """A long text is not held back until the end of its call."""
    text = SAMPLES[name][0].replace("<b>", "word " * 50)
    found = ToolParser(name, TOOLS)
    pieces, seen = [], []
    for character in text:
        new = found.feed(character)
        pieces += new
        seen.append(len("".join(p.fragment for p in pieces if isinstance(p, CallArguments))))
    at = text.index("word ") + 100
    assert seen[at] >= 100
    assert not any(isinstance(piece, Text) for piece in pieces)
    pieces += found.close()
    kinds = [type(piece) for piece in pieces]
    assert kinds[0] is CallBegin and kinds[-1] is CallEnd and kinds.count(CallEnd) == 1


@pytest.mark.parametrize("name", [n for n in NAMED if n not in ("mistral_list", "pythonic")])
def test_a_call_that_was_cut_off(name: str) -> None:
    """The emitted arguments are those that were written, and none of it is text."""
    text = SAMPLES[name][0].replace("<b>", "long text")
    cut = text[: text.index("long") + 4]
    (made,) = read(name, [cut], complete=False)
    assert made[0] == "open" and made[1].endswith("long")
    assert read(name, list(cut), complete=False) == [made]


@pytest.mark.parametrize("name", NAMED)
def test_long_calls_in_one_piece(name: str) -> None:
    text = "".join(SAMPLES[name]).replace("<b>", "word " * 200)
    whole = read(name, [text])
    assert [one[0] for one in whole] == ["open", "now"]
    assert read(name, list(text)) == whole


@pytest.mark.parametrize("name", NAMED)
def test_signs_that_begin_nothing(name: str) -> None:
    sign = FORMS[name].opening or "["
    text = f"{sign} {sign}" + " word" * 100 + sign
    assert "".join(map(str, read(name, [text]))) == text
    assert "".join(map(str, read(name, list(text)))) == text


def test_values_of_plain_text() -> None:
    kinds = {key: kinds_of(FILE, key) for key in ("path", "lines", "mode", "tags", "other")}
    assert kinds["path"] == {"string"} and kinds["lines"] == {"integer", "null"}
    assert kinds["mode"] == {"string"} and kinds["tags"] == {"array"} and kinds["other"] is None
    for text, kind, expected in (
        ("12345678901234567890", "lines", "12345678901234567890"),
        ("None", "lines", "null"),
        ("['a']", "tags", '["a"]'),
        ("true", "path", '"true"'),
        ("a b", "lines", '"a b"'),
        ("{x", "other", '"{x"'),
        ("[1]", "other", "[1]"),
    ):
        assert json_value(text, kinds[kind]) == expected


def test_strings_keep_their_markup() -> None:
    text = (
        "<tool_call>\n<function=open>\n<parameter=path>\n\n<function=x>\n</para>\n\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    for parts in ([text], list(text)):
        assert parsed(read("qwen3_coder", parts)) == [
            ("open", {"path": "\n<function=x>\n</para>\n"})
        ]


def test_a_form_may_say_that_a_value_is_text() -> None:
    begin = '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="now">\n<｜DSML｜parameter name="x" string='
    end = ">12</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
    for given, value in (('"true"', "12"), ('"false"', 12)):
        assert parsed(read("deepseek_v4", [begin + given + end])) == [("now", {"x": value})]


@pytest.mark.parametrize(
    "text, expected",
    [
        ("[now()]", [("now", {})]),
        ('[open(path="a)]\\"", tags=["x", (1, 2)], lines=None, mode=true)]', None),
        ("<|python_start|>[now()]<|python_end|>", [("now", {})]),
        ("[now()] So.", [("now", {}), "So."]),
        ("[open(path=f())]", ["[open(path=f())]"]),
        ("[open('a')]", ["[open('a')]"]),
        ("[now(), 3]", [("now", {}), "3]"]),
    ],
)
def test_python_calls(text: str, expected: list[object] | None) -> None:
    arguments = {"path": 'a)]"', "tags": ["x", [1, 2]], "lines": None, "mode": True}
    for parts in ([text], list(text)):
        assert parsed(read("pythonic", parts)) == (expected or [("open", arguments)])


TEMPLATES = {
    "qwen3_coder": "<tool_call>\n<function=example>",
    "hermes": '<tool_call>{"name"',
    "mistral": "{{ '[TOOL_CALLS]' + name + '[ARGS]' }}",
    "mistral_list": "{{ '[TOOL_CALLS] [' }}",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ type }}\n```json\n",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ name }}<｜tool▁sep｜>",
    "deepseek_v32": "<｜DSML｜function_calls>",
    "deepseek_v4": "<｜DSML｜tool_calls>",
    "pythonic": "[func_name1(params_name1=params_value1)]",
    "llama3_json": 'Environment: ipython {"name": function name, "parameters": {}}',
}


@pytest.mark.parametrize("name", NAMED)
def test_the_template_chooses_the_form(name: str) -> None:
    assert choose_parser("auto", "{{ tools }}" + TEMPLATES[name]) == name
    assert choose_parser(name, "{{ tools }}") == name


def test_names_of_other_engines() -> None:
    assert {NAMES[n] for n in ("qwen25", "llama3", "deepseekv3", "qwen3_xml")} == {
        "hermes",
        "llama3_json",
        "deepseek_v3",
        "qwen3_coder",
    }
    assert len(NAMES) == sum(1 + len(form.aliases) for form in ALL)


OFFERED = [
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
    for name, schema in TOOLS.items()
]


@pytest.mark.parametrize("name", NAMED)
def test_grammars_of_required_calls(compiler: GrammarCompiler, name: str) -> None:
    """The parser reads what the grammar allows, and the grammar allows nothing else."""
    grammar = tool_grammar(OFFERED, "required", name, several=True)
    text = "".join(SAMPLES[name])
    assert takes(compiler, grammar, text)
    for bad in ("Hello", text.replace("open", "shut"), text.replace("3", '"x"'), f"Hm. {text}"):
        assert not takes(compiler, grammar, bad), bad


@pytest.mark.parametrize("name", NAMED)
def test_grammars_of_strict_calls(compiler: GrammarCompiler, name: str) -> None:
    grammar = strict_grammar(OFFERED, name)
    if grammar is None:
        assert name == "pythonic"
        return
    text = "".join(SAMPLES[name])
    for good in (text, "A text, < [x] and {1}."):
        assert takes(compiler, grammar, good), good
    assert not takes(compiler, grammar, text.replace("3", '"x"'))


def test_special_tokens_stand_in_grammars_by_their_ids() -> None:
    tokens = (*(bytes([i]) for i in range(256)), b"[TOOL_CALLS]", b"[ARGS]")
    compiler = GrammarCompiler(Vocabulary(tokens, (256, 257)))
    special = {"[TOOL_CALLS]": 256, "[ARGS]": 257}
    for grammar in (
        tool_grammar(OFFERED, "required", "mistral", special=special),
        strict_grammar(OFFERED, "mistral", special),
    ):
        state = compiler.compile(grammar, [0])
        for token in (256, *b"open", 257, *WRITTEN.encode()):
            state.accept(token)
            assert state.error is None, token
        state = compiler.compile(grammar, [0])
        for token in (256, *b"open", 257, *b'{"lines": "'):
            state.accept(token)
        assert state.error is not None
