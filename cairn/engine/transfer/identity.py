"""What engines must have in common for records of one to be used by the other."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path

from cairn.cache.record import fingerprint
from cairn.cache.schema import CacheSchema
from cairn.config import EngineConfig
from cairn.models.checkpoint import has_weights, is_gguf, read_headers
from cairn.specs.experts import without_places

KEY_BYTES = 16
COMPARED = 4096
"""Bytes hashed at the beginning of each stored tensor to tell checkpoints apart."""
SHOWN = 60
"""Characters of a difference in messages."""


@dataclass(frozen=True)
class Identity:
    """The model with the options that shape records, the records' layout, and as far as the
    beginning of each tensor tells the weights. Ranks, and which of them has which experts, are each
    engine's own business.

    Attributes:
        text: all of it, readable.
    """

    text: str

    @classmethod
    def of(cls, folder: Path, config: EngineConfig, schema: CacheSchema) -> Identity:
        """The identity of an engine.

        Args:
            schema: of the whole model.
        """
        parts = (
            f"dtype={config.dtype}, kv_cache_dtype={config.kv_cache_dtype}",
            f"page_size={schema.page_size}",
            repr(without_places(config.model)),
            f"records={fingerprint(schema).hex()}",
            f"weights={_weights(folder, config)}",
        )
        return cls(", ".join(parts))

    @cached_property
    def key(self) -> bytes:
        """16 bytes; equal for engines whose records may be exchanged."""
        return blake2b(self.text.encode(), digest_size=KEY_BYTES).digest()

    def difference(self, other: str) -> str:
        """The first value in which another engine's text differs, as a sentence."""
        pairs = zip(self.text, other, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), 0)
        begin = max(self.text.rfind(sign, 0, at) for sign in " (") + 1
        there, here = (
            re.split(r"[,)]", text[begin : begin + SHOWN])[0] for text in (other, self.text)
        )
        return f"it has {there}, this engine {here}"


def _weights(folder: Path, config: EngineConfig) -> str:
    if config.load_format == "random":
        return f"random {config.seed}"
    found = blake2b(digest_size=KEY_BYTES)
    if has_weights(folder) or is_gguf(folder):
        for name, entry in sorted(read_headers(folder).items()):
            found.update(f"{name} {entry.dtype} {entry.shape}".encode())
            with entry.file.open("rb") as file:
                file.seek(entry.begin)
                found.update(file.read(min(COMPARED, entry.end - entry.begin)))
    return found.hexdigest()
