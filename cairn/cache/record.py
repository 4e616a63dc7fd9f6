"""Records: the fields of all layers for one page, one window page or one state, as contiguous
bytes.

A record depends neither on page numbers nor on pool sizes, so it can leave the device: into host
memory (`cairn.cache.host`) and from there to another engine whose schema has the same fingerprint.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b

import xxhash

from cairn.cache.host import PAGE, STATE, WINDOW
from cairn.cache.schema import CacheSchema

ALIGNMENT = 16
VERSION = 1


@dataclass(frozen=True, slots=True)
class Part:
    """One field in a record: `nbytes` bytes from `begin` on.

    Attributes:
        layer: index of the layer.
        name: name of the field.
        begin, nbytes: its range in the record.
    """

    layer: int
    name: str
    begin: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """The layout of one kind of record; `nbytes` is 0 if no layer has such fields.

    Attributes:
        parts: by layer, in the order of the schema; each begins at a multiple of ALIGNMENT.
        nbytes: size of a record.
    """

    parts: tuple[Part, ...]
    nbytes: int

    @classmethod
    def of(cls, schema: CacheSchema, kind: int) -> RecordLayout:
        """The layout of a kind."""
        parts, end = [], 0
        for layer, name, nbytes in _fields(schema, kind):
            parts.append(Part(layer, name, end, nbytes))
            end += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return cls(tuple(parts), end)


def checksum(content: bytearray | memoryview) -> int:
    """The 64-bit checksum of a record's bytes. Other threads run meanwhile."""
    return xxhash.xxh3_64_intdigest(content)


def layouts(schema: CacheSchema) -> tuple[RecordLayout, ...]:
    """The layouts of all kinds of records, by kind."""
    return tuple(RecordLayout.of(schema, kind) for kind in (PAGE, WINDOW, STATE))


def fingerprint(schema: CacheSchema) -> bytes:
    """16 bytes; equal where records have the same layout and hold the same fields."""
    said = [f"{VERSION} {sys.byteorder} {schema.page_size} {schema.reach}"]
    for layer, groups in zip(schema.layers, schema.group_of, strict=True):
        said += [f"{entry!r} in group {groups[entry.name]}" for entry in layer.pages]
        said += [repr(entry) for entry in layer.rows]
        said.append("")
    return blake2b("\n".join(said).encode(), digest_size=16).digest()


def _fields(schema: CacheSchema, kind: int) -> Iterator[tuple[int, str, int]]:
    """(layer, name, bytes) of the fields in a record."""
    for i, (layer, groups) in enumerate(zip(schema.layers, schema.group_of, strict=True)):
        if kind == STATE:
            yield from ((i, entry.name, entry.nbytes) for entry in layer.rows)
        else:
            for entry in layer.pages:
                if groups[entry.name] == kind:
                    yield i, entry.name, entry.nbytes
