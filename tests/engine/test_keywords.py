"""Schema keywords that llguidance does not support: rewritten to others, or refused by name."""

from __future__ import annotations

import logging

import pytest

from cairn.engine import keywords
from cairn.engine.grammar import GrammarCompiler
from tests.engine.test_schema import BYTES, refusal, taken

ANY = ("1", "1.5", '"a"', "null", "true", "[]", "{}")


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(BYTES)


@pytest.mark.parametrize(
    "schema, good",
    [
        ({"not": {"type": "string"}}, ["1", "1.5", "null", "true", "[]", "{}"]),
        ({"not": {"type": ["number", "object"]}}, ['"a"', "null", "true", "[]"]),
        ({"type": ["string", "null"], "not": {"type": "null"}}, ['"a"']),
        ({"type": "integer", "not": {"type": "number"}}, []),
        ({"enum": [1, True, None], "not": {"const": 1}}, ["null", "true"]),
        ({"enum": [1, True, None], "not": {"enum": [True, None]}}, ["1"]),
        ({"type": "boolean", "not": False}, ["true"]),
    ],
)
def test_the_keyword_not(compiler, schema, good):
    if good:
        assert taken(compiler, schema, *ANY) == good
    else:
        refusal(compiler, schema)


def test_a_property_that_must_be_absent(compiler):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "not": {"required": ["a"]},
    }
    texts = ("{}", '{"b": 1}', '{"a": 1}', '{"a": 1, "b": 1}')
    assert taken(compiler, schema, *texts) == ["{}", '{"b": 1}']


@pytest.mark.parametrize(
    "names, good",
    [
        ({"pattern": "^a"}, ["{}", '{"a": 1}', '{"ab": 1, "a": 2}']),
        ({"type": "string", "enum": ["ab", "c"]}, ["{}", '{"ab": 1}', '{"ab": 1, "c": 2}']),
        ({"const": "c"}, ["{}", '{"c": 1}']),
    ],
)
def test_names_of_properties(compiler, names, good):
    schema = {"type": "object", "additionalProperties": {"type": "integer"}}
    texts = (
        "{}", '{"a": 1}', '{"ab": 1}', '{"c": 1}', '{"b": 1}', '{"ab": 1, "a": 2}',
        '{"ab": 1, "c": 2}', '{"a": "x"}',
    )  # fmt: skip
    plain = taken(compiler, schema, *texts)
    left = taken(compiler, {**schema, "propertyNames": names}, *texts)
    assert set(good) <= set(left) <= set(plain) and '{"b": 1}' not in left
    for any_name in (True, {}, {"type": "string"}):
        assert taken(compiler, {**schema, "propertyNames": any_name}, *texts) == plain


def test_named_properties_that_their_rule_forbids(compiler):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "propertyNames": {"pattern": "^a$"},
    }
    assert taken(compiler, schema, '{"a": 1}', '{"b": 1}') == ['{"a": 1}']


def test_repeated_items_pass_with_a_warning(compiler, caplog):
    keywords._warn_of_repeated_items.cache_clear()
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    with caplog.at_level(logging.WARNING):
        assert taken(compiler, schema, "[1, 2]", "[1, 1]", '["a"]') == ["[1, 2]", "[1, 1]"]
    assert "uniqueItems" in caplog.text


@pytest.mark.parametrize(
    "schema, key",
    [
        ({"not": {"pattern": "a"}}, "not"),
        ({"not": {"type": "integer"}}, "not"),
        ({"type": "string", "not": {"const": "a"}}, "not"),
        ({"properties": {"x": {"not": True}}}, "properties.x.not"),
        ({"type": "object", "propertyNames": {"maxLength": 3}}, "propertyNames"),
        ({"type": "object", "propertyNames": {"pattern": "("}}, "propertyNames"),
        ({"if": {"type": "string"}, "then": {"minLength": 1}}, "if"),
        ({"type": "array", "contains": {"const": 1}}, "contains"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ],
)
def test_refused_by_name(compiler, schema, key):
    assert key in refusal(compiler, schema)
