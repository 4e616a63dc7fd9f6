"""Number of distinct pages that adjacent queries select, by observing landmark_attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cairn import ops

NEIGHBOURS = 16


class SelectionWatch(TorchDispatchMode):
    """Within the block, observes the calls of landmark_attention in this thread.

    Attributes:
        blocks: number of blocks of NEIGHBOURS adjacent queries of one row that select topk pages
            each, counted per KV head.
        pages: distinct pages that a block selects, summed over the blocks.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.blocks = 0
        self.pages = 0

    @property
    def union(self) -> float | None:
        """Mean number of distinct pages per block; None without blocks."""
        return self.pages / self.blocks if self.blocks else None

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operator; count the pages if it is landmark_attention."""
        result = func(*args, **(kwargs or {}))
        if func is ops.landmark_attention.registered:
            given = dict(zip(ops.landmark_attention.__signature__.parameters, args, strict=False))
            self._add(result[1], {**given, **(kwargs or {})}["row"])
        return result

    def _add(self, indices: Tensor, row: Tensor) -> None:
        """indices [T, h_kv, K] int32, -1 where no page is selected; row [T]."""
        count = indices.shape[0] // NEIGHBOURS
        if not count:
            return
        rows = row[: count * NEIGHBOURS].view(count, NEIGHBOURS)
        blocks = indices[: count * NEIGHBOURS].view(count, NEIGHBOURS, *indices.shape[1:])
        full = (rows == rows[:, :1]).all(1) & (blocks >= 0).flatten(1).all(1)
        ordered = blocks.transpose(1, 2).flatten(2).sort(dim=-1).values
        different = 1 + (ordered[..., 1:] != ordered[..., :-1]).sum(dim=-1)
        self.blocks += int(full.sum()) * indices.shape[1]
        self.pages += int(torch.where(full.unsqueeze(1), different, 0).sum())
