"""Shows that no value satisfies several JSON schemas at once, such as two branches of a `oneOf`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from math import ceil, floor, inf
from typing import Any
from urllib.parse import unquote

MAX_STEPS = 20_000
"""Schemas that are looked at for one document: some documents would need a number of them that is
exponential in their size."""
MAX_DEPTH = 24
"""Levels of properties and items that are followed."""

_TYPES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
"""Here "number" means those that are no integers."""
_FORMATS = frozenset(("date", "time", "date-time", "duration", "email", "ipv4", "ipv6", "uuid"))
"""No text has two of these formats."""
_SIZES = {"string": "Length", "array": "Items", "object": "Properties"}

Schema = Any
"""A parsed schema: an object, true or false; whatever else stands there is read as true."""
Part = Mapping[str, Any]


class Exclusion:
    """Looks for contradictions between the schemas of one document.

    What it does not understand it takes for satisfiable, so it may miss a contradiction, but never
    finds one that is none.

    Args:
        document: the root, in which local references are looked up.
        nested_ids: some schema inside has an `$id`, against which its references are resolved.
        size: characters of the document; fewer steps are taken for a short one.
    """

    def __init__(self, document: Schema, nested_ids: bool = False, size: int = MAX_STEPS) -> None:
        self._document = None if nested_ids else document
        self._steps = min(MAX_STEPS, 2000 + 8 * size)

    def all_exclude(self, branches: Sequence[Schema], context: Schema) -> bool:
        """Whether no value that satisfies the context can satisfy two of the branches."""
        told_apart = self._tagged(branches)
        return all(
            {i, j} <= told_apart or self.excludes([context, branches[i], branches[j]])
            for i, j in combinations(range(len(branches)), 2)
        )

    def _tagged(self, branches: Sequence[Schema]) -> frozenset[int]:
        """Indices of branches that are objects with a tag: a required text that differs."""
        tags = {i: self._tags(branch) for i, branch in enumerate(branches)}
        objects = [i for i, found in tags.items() if found]
        for name in tags[objects[0]] if objects else ():
            values = [value for i in objects for value in tags[i].get(name, ())]
            if all(name in tags[i] for i in objects) and len(set(values)) == len(values):
                return frozenset(objects)
        return frozenset()

    def _tags(self, branch: Schema) -> dict[str, list[str]]:
        """Required members that can have certain texts only; none where it may be no object."""
        parts = self._parts([branch]) or []
        if not any(_types(part) == {"object"} for part in parts):
            return {}
        tags = {}
        for name in (name for part in parts for name in _names(part.get("required"))):
            for said in self._parts([_member(part, name) for part in parts]) or []:
                values = _constants(said)
                if values and all(isinstance(value, str) for value in values):
                    tags[name] = list(dict.fromkeys(values))
        return tags

    def excludes(self, schemas: Sequence[Schema], depth: int = 0) -> bool:
        """Whether no value can satisfy all of the schemas."""
        parts = self._parts(schemas)
        if parts is None:
            return True
        if not parts or depth > MAX_DEPTH or self._steps < 0:
            return False
        constants = next((_constants(part) for part in parts if _constants(part) is not None), None)
        if constants is not None:
            return all(any(self._rejects(part, value) for part in parts) for value in constants)
        types = frozenset.intersection(_TYPES, *map(_types, parts))
        if all(self._excludes_type(kind, parts, depth) for kind in types):
            return True
        return any(
            all(self.excludes([*_without(parts, i, key), option], depth + 1) for option in options)
            for i, key, options in _alternatives(parts)
        )

    def _parts(self, schemas: Sequence[Schema]) -> list[Part] | None:
        """The objects that a value of all schemas satisfies; None: one is false."""
        parts: list[Part] = []
        left, seen = list(schemas), set[str]()
        while left and self._steps >= 0:
            self._steps -= 1
            schema = left.pop()
            if schema is False:
                return None
            if not isinstance(schema, dict):
                continue
            parts.append(schema)
            if isinstance(schema.get("allOf"), list):
                left += schema["allOf"]
            reference = schema.get("$ref")
            if isinstance(reference, str) and reference not in seen:
                seen.add(reference)
                left.append(self._find(reference))
        return parts

    def _find(self, reference: str) -> Schema:
        """What a local reference points to; true where it is not found."""
        if reference != "#" and not reference.startswith("#/"):
            return True
        found = self._document
        for name in unquote(reference).split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and name in found:
                found = found[name]
            elif isinstance(found, list) and name in map(str, range(len(found))):
                found = found[int(name)]
            else:
                return True
        return found

    def _excludes_type(self, kind: str, parts: list[Part], depth: int) -> bool:
        if kind in ("integer", "number"):
            return _no_number(parts, kind == "integer")
        if kind not in _SIZES:
            return False
        least = max(_size(part, f"min{_SIZES[kind]}", 0) for part in parts)
        most = min(_size(part, f"max{_SIZES[kind]}", inf) for part in parts)
        if least > most:
            return True
        if kind == "string":
            names = [part.get("format") for part in parts]
            return len({name for name in names if isinstance(name, str)} & _FORMATS) > 1
        if kind == "array":
            places = range(int(min(least, max(map(_num_placed, parts)))))
            return any(self.excludes([_item(part, i) for part in parts], depth + 1) for i in places)
        required = dict.fromkeys(name for part in parts for name in _names(part.get("required")))
        return any(
            self.excludes([_member(part, name) for part in parts], depth + 1) for name in required
        )

    def _rejects(self, schema: Schema, value: Any, depth: int = 0) -> bool:
        """Whether a value surely does not satisfy a schema."""
        parts = self._parts([schema])
        if parts is None:
            return True
        if depth > MAX_DEPTH or self._steps < 0:
            return False
        return any(self._part_rejects(part, value, depth) for part in parts)

    def _part_rejects(self, part: Part, value: Any, depth: int) -> bool:
        constants = _constants(part)
        if constants is not None:
            self._steps -= len(constants) // 16
            if value not in constants:
                return True
        kind = _type_of(value)
        if kind not in _types(part):
            return True
        if kind in ("integer", "number") and _no_number([part, {"const": value}], False):
            return True
        if kind in _SIZES:
            least, most = (_size(part, f"{end}{_SIZES[kind]}", default) for end, default in _ENDS)
            if not least <= len(value) <= most:
                return True
        if isinstance(value, dict):
            if any(name not in value for name in _names(part.get("required"))):
                return True
            if any(self._rejects(_member(part, k), v, depth + 1) for k, v in value.items()):
                return True
        return any(
            all(self._rejects(option, value, depth + 1) for option in options)
            for _, _, options in _alternatives([part])
        )


_ENDS = (("min", 0.0), ("max", inf))


def _constants(part: Part) -> list[Any] | None:
    """The only values that a part allows; None where it names none."""
    if "const" in part:
        return [part["const"]]
    values = part.get("enum")
    return values if isinstance(values, list) else None


def _types(part: Part) -> frozenset[str]:
    given = part.get("type")
    names = given if isinstance(given, list) else [given]
    if not all(isinstance(name, str) for name in names):
        return _TYPES
    return frozenset(names) | (frozenset(("integer",)) if "number" in names else frozenset())


def _type_of(value: Any) -> str:
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    names = {type(None): "null", bool: "boolean", int: "integer", str: "string", list: "array"}
    return names.get(type(value), "object")


def _no_number(parts: Sequence[Part], whole: bool) -> bool:
    """Whether no number (or integer) lies within the bounds of all parts."""
    low, high = -inf, inf
    excluded: list[float] = []
    for part in parts:
        bounds = {k: v for k, v in part.items() if type(v) in (int, float)}
        for name in ("Minimum", "Maximum"):
            # The fourth draft has a flag beside the bound, later ones a bound of its own.
            flagged = part.get(f"exclusive{name}") is True
            key = name.lower() if flagged else f"exclusive{name}"
            excluded += [bounds[key]] if key in bounds else []
        low = max(low, *(bounds.get(key, -inf) for key in _LOW))
        high = min(high, *(bounds.get(key, inf) for key in _HIGH))
    if whole and -inf < low and high < inf:
        low, high = ceil(low), floor(high)
    return low > high or (low == high and low in excluded)


_LOW = ("minimum", "exclusiveMinimum", "const")
_HIGH = ("maximum", "exclusiveMaximum", "const")


def _size(part: Part, key: str, default: float) -> float:
    value = part.get(key)
    return value if isinstance(value, int | float) else default


def _names(value: Any) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def _member(part: Part, name: str) -> Schema:
    """What a part says of a member of an object."""
    properties = part.get("properties")
    if isinstance(properties, dict) and name in properties:
        return properties[name]
    return True if "patternProperties" in part else part.get("additionalProperties", True)


def _placed(part: Part) -> list[Schema]:
    """Schemas of the first items, one by one."""
    for key in ("prefixItems", "items"):
        if isinstance(part.get(key), list):
            placed: list[Schema] = part[key]
            return placed
    return []


def _num_placed(part: Part) -> int:
    return len(_placed(part)) + ("items" in part)


def _item(part: Part, i: int) -> Schema:
    placed = _placed(part)
    if i < len(placed):
        return placed[i]
    items = part.get("items", True)
    return part.get("additionalItems", True) if isinstance(items, list) else items


def _alternatives(parts: Sequence[Part]) -> Iterator[tuple[int, str, list[Schema]]]:
    """(part, keyword, branches) of each `anyOf` and `oneOf`."""
    for i, part in enumerate(parts):
        for key in ("anyOf", "oneOf"):
            if isinstance(part.get(key), list) and part[key]:
                yield i, key, part[key]


def _without(parts: Sequence[Part], i: int, key: str) -> list[Schema]:
    """The parts without the references that were followed; part `i` has lost a keyword too."""
    lost: list[tuple[str, ...]] = [("$ref", "allOf")] * len(parts)
    lost[i] += (key,)
    return [
        {name: value for name, value in part.items() if name not in names}
        for part, names in zip(parts, lost, strict=True)
    ]
