"""Whole-model records, assembled from the parts in each rank's host memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cairn.cache.host import STATE
from cairn.cache.record import RecordLayout, checksum, layouts
from cairn.cache.schema import CacheSchema
from cairn.distributed.groups import Group
from cairn.models.sharding import Share
from cairn.runner.device_records import DeviceRecords
from cairn.runner.host_records import HostRecords

Raw = NDArray[np.uint8]


class _Field(NamedTuple):
    """The layout of a field in a whole-model record and in the ranks' records.

    Attributes:
        whole: offset, and shape [.., bytes per element].
        own: likewise, in a rank's.
        shares: the part that each rank has; empty: every rank has the whole field.
    """

    whole: tuple[slice, tuple[int, ...]]
    own: tuple[slice, tuple[int, ...]]
    shares: tuple[Share, ...]


class JoinedRecords:
    """Records of a multi-rank engine in the format of a single-rank engine, so that peers may have
    any number of ranks.

    Args:
        own: records of rank 0, which knows those of the others.
        schema: of the whole model.
        rank_schema: of a rank.
    """

    def __init__(self, own: HostRecords, schema: CacheSchema, rank_schema: CacheSchema) -> None:
        self._memories = own.memories
        self._layouts = layouts(schema)
        self._fields = [
            _fields(kind, whole, part, schema, rank_schema, len(own.memories))
            for kind, (whole, part) in enumerate(zip(self._layouts, own.layouts, strict=True))
        ]
        self._arriving: dict[tuple[int, int], bytearray] = {}

    def record(self, kind: int, slot: int) -> memoryview:
        """See `HostRecords`."""
        self._arriving[kind, slot] = found = bytearray(self._layouts[kind].nbytes)
        return memoryview(found)

    def seal(self, kind: int, slot: int) -> int:
        """Give each rank its part of what was written, and note their checksums; returns that of
        the whole."""
        content = self._arriving.pop((kind, slot))
        whole = np.frombuffer(content, dtype=np.uint8)
        for rank, memory in enumerate(self._memories):
            own = memory.rows[kind][slot]
            own[:] = 0
            for field in self._fields[kind]:
                read = _view(whole, field.whole)
                _view(own, field.own)[...] = (
                    np.concatenate([read[at] for at in _indices(field, rank)], _axis(field))
                    if field.shares
                    else read
                )
            memory.sums[kind][slot] = checksum(own)
        return checksum(content)

    def content(self, kind: int, slot: int) -> memoryview:
        """See `HostRecords`."""
        found = np.zeros(self._layouts[kind].nbytes, dtype=np.uint8)
        for rank, memory in enumerate(self._memories):
            own = memory.rows[kind][slot]
            for field in self._fields[kind]:
                written, read = _view(found, field.whole), _view(own, field.own)
                begin, axis = 0, _axis(field)
                if not field.shares:
                    written[...] = read
                for at in _indices(field, rank):
                    count = at[axis].stop - at[axis].start
                    taken = (slice(None),) * axis + (slice(begin, begin + count),)
                    written[at] = read[taken]
                    begin += count
        return found.data

    def sum_of(self, kind: int, slot: int) -> int | None:
        """See `HostRecords`."""
        for memory in self._memories:
            if checksum(memory.rows[kind][slot]) != int(memory.sums[kind][slot]):
                return None
        return checksum(self.content(kind, slot))


Records = HostRecords | JoinedRecords | DeviceRecords
"""Any kind of records."""


def _fields(
    kind: int,
    whole: RecordLayout,
    own: RecordLayout,
    schema: CacheSchema,
    rank_schema: CacheSchema,
    ranks: int,
) -> list[_Field]:
    found = []
    for a, b in zip(whole.parts, own.parts, strict=True):
        entries: list[Any] = [
            next(e for e in _entries(each, kind, a.layer) if e.name == a.name)
            for each in (schema, rank_schema)
        ]
        in_whole, in_own = (
            (slice(part.begin, part.begin + part.nbytes), (*entry.shape, entry.dtype.itemsize))
            for part, entry in zip((a, b), entries, strict=True)
        )
        shape, own_shape = (entry.shape for entry in entries)
        pieces = getattr(entries[0], "pieces", ())
        shares = [Share.of(shape, own_shape, pieces, Group(n, ranks)) for n in range(ranks)]
        found.append(_Field(in_whole, in_own, tuple(shares) if shares[0].parts else ()))
    return found


def _entries(schema: CacheSchema, kind: int, layer: int) -> Sequence[Any]:
    return schema.layers[layer].rows if kind == STATE else schema.layers[layer].pages


def _view(record: Raw, place: tuple[slice, tuple[int, ...]]) -> Raw:
    at, shape = place
    return record[at].reshape(shape)


def _axis(field: _Field) -> int:
    return field.shares[0].axis if field.shares else 0


def _indices(field: _Field, rank: int) -> Iterator[tuple[slice, ...]]:
    """Where a rank's parts are in the whole field."""
    if field.shares:
        share = field.shares[rank]
        for part in share.parts:
            yield (*(slice(None),) * share.axis, part)
