"""A cache of the vision encoder's outputs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cairn.attention.batch import Inserted
from cairn.runner.media import Insert, MediaItem
from cairn.runner.staging import send


class EncoderCache:
    """Embeddings of images and videos by the hash of their pixels; least recently used first out.

    An item is encoded when its first token is in a step. A chunk of a prompt may end inside an
    image: the next chunk finds the rest here. Each item is encoded by itself, so encoding an
    evicted one again gives the same numbers.

    Args:
        encode: [frames, height, width, 3] uint8 -> [n, hidden].
        budget: bytes that the cache holds; the newest item stays even if it is larger.
        device: of the encoder and the embeddings.

    Attributes:
        encoded: items that were encoded (misses).
        found: hits.
    """

    def __init__(
        self, encode: Callable[[Tensor], Tensor], budget: int, device: torch.device
    ) -> None:
        self._encode, self._budget, self._device = encode, budget, device
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        self._bytes = 0
        self.encoded = self.found = 0

    def of(self, item: MediaItem) -> Tensor:
        """Embeddings [n, hidden] of an item; the caller must not write to them."""
        kept = self._kept.get(item.digest)
        if kept is not None:
            self.found += 1
            self._kept.move_to_end(item.digest)
            return kept
        (pixels,) = send((item.array().copy(),), self._device)
        self.encoded += 1
        made = self._kept[item.digest] = self._encode(pixels)
        self._bytes += made.nbytes
        while self._bytes > self._budget and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            self._bytes -= dropped.nbytes
        return made

    def inserted(self, inserts: Sequence[Insert]) -> Inserted | None:
        """The embeddings that replace a step's placeholder tokens; None: it has none."""
        if not inserts:
            return None
        rows = [self.of(i.item)[i.begin : i.end] for i in inserts]
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
