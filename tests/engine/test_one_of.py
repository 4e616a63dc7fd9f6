"""`oneOf`: supported if its branches exclude each other, also through references; else refused."""

from __future__ import annotations

import json
import time

import pytest

from cairn.engine.exclusion import Exclusion
from cairn.engine.grammar import GrammarCompiler
from cairn.engine.schema import prepared
from tests.engine.test_schema import BYTES, refusal, taken

OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}


def tagged(tag: object) -> dict:
    return {"type": "object", "properties": {"k": tag}, "required": ["k"]}


DEFS = {
    "object": OBJECT,
    "other": {**OBJECT, "properties": {"b": {}}, "required": ["b"]},
    "dog": tagged({"enum": ["dog", "wolf"]}),
    "cat": tagged({"$ref": "#/$defs/tag"}),
    "tag": {"const": "cat"},
    "wolf": tagged({"enum": ["wolf", "fox"]}),
    "list": {"type": "array", "items": {"$ref": "#"}},
    "chain": {"$ref": "#/$defs/list"},
    "loop": {"$ref": "#/$defs/loop"},
    "a/b c": {"type": "string"},
    "small": {"type": "integer", "maximum": 4},
    "large": {"type": "integer", "exclusiveMinimum": 4},
    "untyped": {"properties": {"a": {}}},
}


def ref(name: str) -> dict:
    return {"$ref": f"#/$defs/{name}"}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(BYTES)


@pytest.mark.parametrize(
    ("branches", "inside", "outside"),
    [
        ([{"type": "null"}, ref("object")], ["null", '{"a": 1}'], ["1", "{}"]),
        ([{"type": "integer"}, ref("list")], ["1", "[1, []]"], ['"a"']),
        ([{"type": "integer"}, ref("chain")], ["1", "[]"], ["null"]),
        ([ref("a~1b%20c"), {"type": "null"}], ['"x"', "null"], ["1"]),
        ([ref("dog"), ref("cat")], ['{"k": "wolf"}', '{"k": "cat"}'], ['{"k": "fox"}', "{}"]),
        ([{"type": "null"}, ref("dog"), ref("cat")], ["null", '{"k": "dog"}'], ['{"k": 1}']),
        ([ref("object"), ref("other")], ['{"a": 1}', '{"b": []}'], ["{}"]),
        ([ref("small"), ref("large")], ["4", "5"], ['"4"', "4.5"]),
        (
            [{"type": "number", "exclusiveMaximum": 0.5}, {"type": "number", "minimum": 0.5}],
            ["0.4", "0.5"],
            ["null"],
        ),
        (
            [{"type": "string", "format": "date"}, {"type": "string", "format": "date-time"}],
            ['"2024-01-01"', '"2024-01-01T00:00:00Z"'],
            ['"x"'],
        ),
        (
            [{"type": "string", "maxLength": 1}, {"type": "string", "minLength": 3}],
            ['"a"', '"abc"'],
            ['"ab"'],
        ),
        (
            [
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                {"type": "array", "prefixItems": [{"type": "null"}], "minItems": 1},
            ],
            ['["a"]', "[null, 1]"],
            ["[]", "[1]"],
        ),
        (
            [{"allOf": [ref("cat"), {"properties": {"m": {"type": "null"}}}]}, ref("dog")],
            ['{"k": "cat", "m": null}', '{"k": "dog"}'],
            ['{"k": "cat", "m": 1}'],
        ),
        ([{"anyOf": [ref("dog"), {"type": "null"}]}, ref("cat")], ["null"], ['{"k": "fox"}']),
        ([{"enum": ["a", 1]}, {"const": "b"}], ['"a"', '"b"', "1"], ['"c"']),
    ],
)
def test_branches_that_exclude_each_other(compiler, branches, inside, outside):
    schema = {"$defs": DEFS, "oneOf": branches}
    assert taken(compiler, schema, *inside, *outside) == inside


@pytest.mark.parametrize(
    "branches",
    [
        [ref("dog"), ref("wolf")],
        [{"type": "null"}, ref("untyped")],
        [{"type": "integer", "maximum": 5}, {"type": "integer", "minimum": 5}],
        [{"type": "integer"}, {"type": "number"}],
        [{"maximum": 4}, {"minimum": 5}],
        [{"type": "string"}, {"type": "string", "format": "date"}],
        [{"type": "object", "required": ["a"]}, {"type": "object", "required": ["b"]}],
        [{"type": "array", "items": ref("dog")}, {"type": "array", "items": ref("cat")}],
        [ref("object"), ref("object")],
    ],
)
def test_branches_that_overlap_are_refused(compiler, branches):
    message = refusal(compiler, {"$defs": DEFS, "oneOf": branches})
    assert "several branches of a oneOf" in message
    assert "coerce" not in message


def test_keywords_beside_one_of_are_followed(compiler):
    schema = {
        "$defs": DEFS,
        "anyOf": [{"type": "null"}, {"type": "object"}],
        "oneOf": [ref("dog"), ref("cat"), {"type": "null"}, {"type": "integer"}],
    }
    texts = ["null", '{"k": "cat"}', "5", '{"k": "fox"}']
    assert taken(compiler, schema, *texts) == texts[:2]
    # The branches exclude each other only because of the `type` next to them.
    schema = {"type": "integer", "oneOf": [{"maximum": 4}, {"minimum": 5}]}
    assert taken(compiler, schema, "4", "5", '"4"') == ["4", "5"]


def test_recursion_through_a_branch(compiler):
    node = {
        "type": "object",
        "properties": {"next": {"oneOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
        "required": ["next"],
    }
    schema = {"$ref": "#/$defs/node", "$defs": {"node": node}}
    text = '{"next": {"next": null}}'
    assert taken(compiler, schema, text, '{"next": 1}') == [text]


def test_references_that_are_not_followed_prove_nothing():
    for target in (
        "#/$defs/none",
        "#name",
        "https://a.b/c",
        "#/$defs/loop",
        "#/$defs/" + "9" * 5000,
    ):
        document = {"$defs": DEFS, "oneOf": [{"type": "null"}, {"$ref": target}]}
        assert not Exclusion(document).excludes(document["oneOf"])
    document = {"$defs": DEFS, "oneOf": [{"type": "null"}, ref("object")]}
    assert Exclusion(document).excludes(document["oneOf"])
    assert not Exclusion(document, nested_ids=True).excludes(document["oneOf"])


MANY = 300


@pytest.mark.parametrize(
    ("schema", "taken"),
    [
        (
            {
                "oneOf": [ref(f"t{i}") for i in range(MANY)],
                "$defs": {f"t{i}": tagged({"const": f"t{i}"}) for i in range(MANY)},
            },
            True,
        ),
        (
            {
                "oneOf": [ref(f"c{i}") for i in range(50)],
                "$defs": {f"c{i}": ref(f"c{i + 1}") for i in range(10_000)},
            },
            False,
        ),
        (
            {
                "oneOf": [
                    {"allOf": [{"anyOf": [{"minimum": i}, {"maximum": i}]} for i in range(30)]}
                    for _ in range(2)
                ]
            },
            False,
        ),
        ({"oneOf": [{"enum": list(range(i, 50_000, 2))} for i in range(2)]}, False),
    ],
    ids=["tags", "chains", "exponential", "enums"],
)
def test_large_schemas_take_little_time(schema, taken):
    size = len(json.dumps(schema))
    began = time.process_time()
    assert ("anyOf" in prepared(schema)) == taken
    assert time.process_time() - began < 0.5 + size / 500_000
