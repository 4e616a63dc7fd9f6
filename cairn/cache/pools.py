"""The cache memory of layers: one tensor per field, indexed by page or by sequence. It is on the
device, except fields in host memory, which have frames on the device (`cairn.cache.frames`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from cairn.cache.frames import Frames
from cairn.cache.schema import CacheSchema, PageField, RowField
from cairn.errors import OutOfMemory


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """Sizes of the pools.

    Attributes:
        pages: number of physical pages, by page group.
        rows: sequences that run at once.
        snapshots: number of states in addition to those of running sequences.
        frames: frames per layer and head, for pages in host memory.
    """

    pages: tuple[int, ...]
    rows: int = 0
    snapshots: int = 0
    frames: int = 0


class CachePools:
    """The tensors of all fields, allocated once and never moved.

    Memory is not initialised: pages and states must be written before they are read, and masking
    must be safe against NaN.

    Args:
        schema: fields of all layers.
        sizes: sizes of the pools.
        device: device of the tensors.
        spare: whether every group has an extra page, to which padding writes.

    Attributes:
        pages: by layer, field name -> [pages, ...].
        rows: by layer, field name -> [states, ...]: those of running rows, indexed by row, one for
            padding, then snapshots.
        frames: frames of fields in host memory; None: no such fields.
        nbytes: size of everything on the device.

    Raises OutOfMemory, naming the bytes asked for, when the device does not have them.
    """

    def __init__(
        self,
        schema: CacheSchema,
        sizes: PoolSizes,
        device: torch.device | str,
        spare: bool = False,
    ) -> None:
        if len(sizes.pages) != len(schema.groups):
            raise ValueError(f"{len(schema.groups)} page groups, but {len(sizes.pages)} sizes")
        self.schema, self.sizes, self.spare = schema, sizes, spare
        self.num_states = sizes.rows + 1 + sizes.snapshots if schema.has_rows else 0
        pages = sum(
            (count + spare) * group.page_bytes
            for count, group in zip(sizes.pages, schema.groups, strict=True)
        )
        frames = sizes.frames * schema.host_bytes
        self.nbytes = pages + frames + self.num_states * schema.row_bytes
        try:
            self.frames = self._frames(device)
            self.pages = [
                {entry.name: self._page_field(i, entry, device) for entry in layer.pages}
                for i, layer in enumerate(schema.layers)
            ]
            self.rows = [
                {entry.name: self._field(entry, self.num_states, device) for entry in layer.rows}
                for layer in schema.layers
            ]
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            raise OutOfMemory(
                f"{sizes.pages} pages of {schema.page_size} slots and {self.num_states} states "
                f"need {self.nbytes} bytes on {device}",
                "Lower the number of pages",
            ) from error

    @property
    def num_pages(self) -> int:
        """Number of pages of the first group."""
        return self.sizes.pages[0] if self.sizes.pages else 0

    @property
    def spare_pages(self) -> tuple[int, ...] | None:
        """By group, the spare page; None if there is none."""
        return self.sizes.pages if self.spare else None

    @property
    def first_snapshot(self) -> int:
        """Index of the first snapshot among the states."""
        return self.sizes.rows + 1

    def frame_traffic(self) -> tuple[int, int, int]:
        """See `Frames.traffic`; zeros without fields in host memory."""
        return (0, 0, 0) if self.frames is None else self.frames.traffic()

    def tensors(self, group: int | None = None) -> Iterator[Tensor]:
        """The tensors of all page fields, or of one page group's."""
        for layer, groups in zip(self.pages, self.schema.group_of, strict=True):
            for name, tensor in layer.items():
                if group in (None, groups[name]):
                    yield tensor

    def states(self) -> Iterator[Tensor]:
        """The tensors of all row fields."""
        for layer in self.rows:
            yield from layer.values()

    def copy_pages(self, group: int, sources: Tensor, targets: Tensor) -> None:
        """Copy pages [n] int64 of a group to other ones, in all its layers."""
        for field in self.tensors(group):
            field[targets] = field[sources]

    def copy_states(self, sources: Tensor, targets: Tensor) -> None:
        """Copy states [n] int64 to other ones, in all layers."""
        for state in self.states():
            state[targets] = state[sources]

    def _count(self, group: int) -> int:
        return self.sizes.pages[group] + self.spare

    def _frames(self, device: torch.device | str) -> Frames | None:
        """The frames of all layers with fields in host memory."""
        own = {
            i: [entry for entry in layer.pages if entry.selected is not None]
            for i, layer in enumerate(self.schema.layers)
        }
        own = {i: fields for i, fields in own.items() if fields}
        if not own:
            return None
        first = next(iter(own.values()))
        if any(fields != first for fields in own.values()):
            raise ValueError("layers with pages in host memory have unlike fields")
        return Frames(tuple(own), first, self._count(0), self.sizes.frames, device)

    def _page_field(self, layer: int, entry: PageField, device: torch.device | str) -> Tensor:
        if entry.selected is not None and self.frames is not None:
            return self.frames.host[entry.name][self.frames.layers.index(layer)]
        return self._field(entry, self._count(self.schema.group_of[layer][entry.name]), device)

    def _field(self, entry: PageField | RowField, count: int, device: torch.device | str) -> Tensor:
        return torch.empty((count, *entry.shape), dtype=entry.dtype, device=device)


def _is_out_of_memory(error: RuntimeError) -> bool:
    """The CPU allocator and the CUDA driver report exhaustion as a plain RuntimeError."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return any(
        sign in text
        for sign in ("out of memory", "can't allocate memory", "size calculation overflow")
    )
