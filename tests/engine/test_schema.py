"""JSON schemas as clients and generators write them: enforced exactly, or refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cairn.engine.grammar import GrammarCompiler, Vocabulary, json_rule
from cairn.errors import BadRequest
from cairn.types import Grammar
from tests.engine.test_grammar import takes

BYTES = Vocabulary((*(bytes([i]) for i in range(256)), b""))
N = 2**53


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(BYTES)


def taken(compiler: GrammarCompiler, schema: Any, *texts: str) -> list[str]:
    """The texts that satisfy the schema."""
    grammar = Grammar("json_schema", json.dumps(schema))
    return [text for text in texts if takes(compiler, grammar, text)]


def refusal(compiler: GrammarCompiler, schema: Any) -> str:
    with pytest.raises(BadRequest) as caught:
        compiler.compile(Grammar("json_schema", json.dumps(schema)))
    assert caught.value.message.startswith("the JSON schema cannot be used: ")
    return caught.value.message


@pytest.mark.parametrize(
    "value", [N, -N, N + 2, 10**17, 3 * 10**18, 2**62, -(2**62), 2**63 - 1024, 1e17, 0, -5]
)
def test_constants_keep_their_digits(compiler, value):
    exact = str(int(value))
    others = [str(int(value) + change) for change in (-1024, -2, -1, 1, 2, 1024)]
    assert taken(compiler, {"const": value}, exact, *others) == [exact]
    assert taken(compiler, {"enum": ["a", [value]]}, f"[{exact}]", f"[{others[3]}]", '"a"') == [
        f"[{exact}]",
        '"a"',
    ]


@pytest.mark.parametrize("value", [N + 1, -N - 1, 1234567890123456789, 2**63, -(2**63), 10**25 + 1])
@pytest.mark.parametrize(
    ("schema", "path"),
    [
        (lambda value: {"const": value}, "const"),
        (lambda value: {"type": "integer", "enum": [1, value]}, "enum"),
        (lambda value: {"properties": {"id": {"const": {"x": [value]}}}}, "properties.id.const"),
        (lambda value: {"anyOf": [{"type": "null"}, {"enum": [value]}]}, "anyOf[1].enum"),
        (
            lambda value: {"$ref": "#/$defs/id", "$defs": {"id": {"const": value}}},
            "$defs.id.const",
        ),
    ],
)
def test_constants_whose_digits_would_change_are_refused(compiler, schema, path, value):
    assert f"{path} has the number {value}," in refusal(compiler, schema(value))


@pytest.mark.parametrize(
    ("bounds", "inside", "outside"),
    [
        ({"minimum": N, "maximum": N + 4}, [N, N + 1, N + 3, N + 4], [N - 1, N + 5]),
        ({"minimum": -N, "exclusiveMaximum": N}, [-N, 0, N - 1], [-N - 1, N]),
        ({"exclusiveMinimum": N - 1}, [N, N + 1], [N - 1]),
        ({"minimum": 10**17}, [10**17, 10**18, 10**30], [10**17 - 1]),
        ({"minimum": 2**60, "maximum": 2**60 + 4096}, [2**60, 2**60 + 7], [2**60 - 1]),
        ({"minimum": 1e17, "maximum": 2e17}, [10**17], [10**17 - 1, 2 * 10**17 + 1]),
        ({"minimum": 0, "maximum": 2**63 - 1}, [0, 2**63 - 1], [-1, 2**63]),
    ],
)
def test_bounds_of_integers_are_where_they_are_written(compiler, bounds, inside, outside):
    texts = [str(value) for value in (*inside, *outside)]
    expected = [str(value) for value in inside]
    assert taken(compiler, {"type": "integer", **bounds}, *texts) == expected


@pytest.mark.parametrize(
    "bounds",
    [
        {"minimum": N + 1},
        {"maximum": N + 3},
        {"minimum": 1234567890123456789},
        {"maximum": 2**62 + 2},
        {"exclusiveMinimum": N},
        {"exclusiveMaximum": N + 2},
        {"minimum": N, "exclusiveMinimum": True},
        {"minimum": 2**63},
        {"minimum": 1e19},
        {"maximum": -(2**63)},
    ],
)
@pytest.mark.parametrize("kind", [{"type": "integer"}, {"type": ["integer", "null"]}, {}])
def test_bounds_that_would_move_are_refused(compiler, bounds, kind):
    key = next(iter(bounds))
    assert f"{key} has the number" in refusal(compiler, {**kind, **bounds})
    nested = {"allOf": [{"type": "integer"}, {**kind, **bounds}]}
    assert f"allOf[1].{key} has the number" in refusal(compiler, nested)


def test_bounds_of_numbers_that_would_move_are_refused(compiler):
    # Equal as a float, but with other digits.
    assert "minimum has the number" in refusal(compiler, {"type": "number", "minimum": 2**60})
    schema = {"type": "number", "minimum": 10**17, "maximum": 3 * 10**17}
    texts = [str(10**17), f"{10**17 - 1}.5", f"{3 * 10**17}", f"{3 * 10**17}.5"]
    assert taken(compiler, schema, *texts) == [texts[0], texts[2]]


@pytest.mark.parametrize("bounds", [{"minimum": 10**18}, {"maximum": -2e18}])
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_bounds_that_are_too_far_out_are_refused_in_plain_words(compiler, bounds, kind):
    assert "needs a maximum" in refusal(compiler, {"type": kind, **bounds})


INT64 = {"minimum": -(2**63), "maximum": 2**63 - 1}


@pytest.mark.parametrize(
    "bounds",
    [
        INT64,
        {"minimum": -(2**63)},
        {"minimum": -(2**63) + 1, "maximum": 2**63 - 1},
        {"exclusiveMinimum": -(2**63) - 1, "exclusiveMaximum": 2**63},
        {"minimum": -1e19, "maximum": 1e19},
        {"minimum": -(2**64), "maximum": 2**64 - 1},
        {"minimum": -(2**63), "exclusiveMinimum": True},
    ],
)
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_bounds_of_64_bit_integers_are_no_bounds(compiler, bounds, kind):
    texts = ["0", "-5", str(2**63 - 1), str(-(2**63) + 1)]
    assert taken(compiler, {"type": kind, **bounds}, *texts) == texts
    schema = {"type": "array", "items": {"anyOf": [{"type": "null"}, {"type": kind, **bounds}]}}
    assert taken(compiler, schema, "[null, 7]", "[true]") == ["[null, 7]"]


@pytest.mark.parametrize("most", [2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**64 - 1, 1e10])
def test_sizes_that_no_output_reaches_are_no_bounds(compiler, most):
    assert taken(compiler, {"type": "string", "maxLength": most}, '"a"') == ['"a"']
    assert taken(compiler, {"type": "array", "maxItems": most}, "[1, 2]") == ["[1, 2]"]
    assert taken(compiler, {"type": "object", "maxProperties": most}, '{"a": 1}') == ['{"a": 1}']


def test_unsigned_bounds(compiler):
    schema = {"type": "integer", "format": "uint64", "minimum": 0, "maximum": 2**64 - 1}
    assert taken(compiler, schema, "0", str(2**64 - 1), "-1") == ["0", str(2**64 - 1)]


@pytest.mark.parametrize(
    "name",
    ["password", "byte", "path", "uuid4", "uri-reference", "regex", "int64", "URI", "", None, 3],
)
def test_a_format_that_is_not_known_is_an_annotation(compiler, name):
    for schema in (
        {"type": "string", "format": name, "minLength": 2},
        {"format": name, "minLength": 2},
        {"anyOf": [{"type": "null"}, {"type": "string", "format": name, "minLength": 2}]},
        {"$ref": "#/$defs/p", "$defs": {"p": {"type": "string", "format": name, "minLength": 2}}},
    ):
        assert taken(compiler, schema, '"ab"', '"a"') == ['"ab"']


@pytest.mark.parametrize(
    ("name", "inside", "outside"),
    [
        ("date", "2024-02-29", "2024-2-29"),
        ("date-time", "2024-02-29T10:00:00Z", "2024-02-29"),
        ("time", "10:00:00Z", "10"),
        ("duration", "P1D", "1 day"),
        ("email", "a@b.c", "a"),
        ("hostname", "a.b", "a b"),
        ("ipv4", "127.0.0.1", "localhost"),
        ("ipv6", "::1", "127.0.0.1"),
        ("uuid", "00000000-0000-4000-8000-000000000000", "0000"),
        ("uri", "https://a.b/c", "a b"),
    ],
)
def test_formats_that_are_known_are_followed(compiler, name, inside, outside):
    schema = {"type": "string", "format": name}
    assert taken(compiler, schema, f'"{inside}"', f'"{outside}"') == [f'"{inside}"']


def test_names_that_are_also_keywords(compiler):
    schema = {
        "type": "object",
        "properties": {
            "const": {"type": "integer"},
            "minimum": {"const": 7},
            "format": {"type": "string"},
        },
        "required": ["const", "minimum"],
        "default": {"const": N + 1, "minimum": N + 1},
        "examples": [N + 1],
    }
    assert taken(compiler, schema, '{"const": 1, "minimum": 7}', '{"const": 1, "minimum": 8}') == [
        '{"const": 1, "minimum": 7}'
    ]


def test_a_prepared_schema_is_a_copy():
    schema = {"type": "integer", **INT64}
    assert json_rule(schema).count("mum") == 1
    assert schema == {"type": "integer", **INT64}
