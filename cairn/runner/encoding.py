"""A cache of the vision encoder's outputs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from cairn.attention.batch import Inserted
from cairn.distributed.groups import ALONE, Group
from cairn.runner.media import Insert, MediaItem
from cairn.runner.staging import send


class EncoderCache:
    """Embeddings of images and videos by the hash of their pixels, with LRU eviction.

    An item is encoded when its first token is in a step. If a prefill chunk ends inside an image,
    the next chunk finds the rest here. Each item is encoded by itself, so encoding an evicted one
    again gives the same numbers. Every rank has the whole encoder; the ranks share out the items of
    a step and send each other the embeddings.

    Args:
        encode: [frames, height, width, 3] uint8 -> [n, hidden].
        budget: bytes that the cache holds; the newest item stays even if it is larger.
        device: of the encoder and the embeddings.
        group: ranks that run the same steps.

    Attributes:
        encoded: items that were encoded on this rank (misses).
        found: hits.
    """

    def __init__(
        self,
        encode: Callable[[Tensor], Tensor],
        budget: int,
        device: torch.device,
        group: Group = ALONE,
    ) -> None:
        self._encode, self._budget, self._device = encode, budget, device
        self._group = group
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        self._bytes = 0
        self._loads = [0] * group.size
        self.encoded = self.found = 0

    def of(self, items: Iterable[MediaItem]) -> dict[bytes, Tensor]:
        """Embeddings [n, hidden] by item digest; the caller must not write to them."""
        wanted = {item.digest: item for item in items}
        made = self._made([i for digest, i in wanted.items() if digest not in self._kept])
        self.found += len(wanted) - len(made)
        found = dict(made)
        # In the same order on all ranks, so that they evict the same items.
        for digest in wanted:
            if digest not in made:
                self._kept.move_to_end(digest)
                found[digest] = self._kept[digest]
        self._kept |= made
        self._bytes += sum(each.nbytes for each in made.values())
        while self._bytes > self._budget and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            self._bytes -= dropped.nbytes
        return found

    def _made(self, items: list[MediaItem]) -> dict[bytes, Tensor]:
        """Encode the misses: each on one rank, which broadcasts the result."""
        owners = share_out([len(item.pixels) for item in items], self._loads)
        own = {
            item.digest: self._encode(send((item.array().copy(),), self._device)[0])
            for item, owner in zip(items, owners, strict=True)
            if owner == self._group.rank
        }
        self.encoded += len(own)
        if self._group.alone:
            return own
        made = {}
        for item, owner in zip(items, owners, strict=True):
            made[item.digest] = self._group.of_rank(own.get(item.digest), owner, self._device)
        return made

    def inserted(self, inserts: Sequence[Insert]) -> Inserted | None:
        """The embeddings that replace a step's placeholder tokens; None: it has none."""
        if not inserts:
            return None
        found = self.of(insert.item for insert in inserts)
        rows = [found[i.item.digest][i.begin : i.end] for i in inserts]
        index = [torch.arange(i.at, i.at + i.end - i.begin) for i in inserts]
        (places,) = send((torch.cat(index).numpy(),), self._device)
        return Inserted(places, torch.cat(rows))

    @torch.inference_mode()
    def rehearse(self, sides: Sequence[int]) -> None:
        """Encode square images of these sides and store nothing: this compiles the kernels and
        makes the allocator reserve their memory."""
        for side in sides:
            self._encode(torch.zeros(1, side, side, 3, dtype=torch.uint8, device=self._device))

    def clear(self) -> None:
        """Drop everything."""
        self._kept.clear()
        self._bytes = 0


def share_out(sizes: Sequence[int], loads: list[int]) -> list[int]:
    """The rank of each item: largest first, each to the least loaded rank (ties: the earlier item,
    the lower rank).

    Args:
        sizes: cost of each item.
        loads: total cost of each rank so far, updated.
    """
    owners = [0] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[item] = min(range(len(loads)), key=loads.__getitem__)
        loads[owners[item]] += sizes[item]
    return owners
