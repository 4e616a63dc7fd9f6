"""Reads the headers of safetensors files. No torch.

A safetensors file is 8 bytes of header length, the header (JSON: name -> dtype, shape, offsets),
and the data. Pickled weights are never opened.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from cairn.errors import BadModel

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
UNREAD = ("*.safetensors*", "*.h5", "*.msgpack", "*.onnx")
"""Weights in other forms, or under other names."""
CONVERTIBLE = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Stored dtypes that convert without a scale: name in a header -> name."""
ELEMENT_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2,
    "U16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
"""Bytes of one element of a stored dtype."""
MAX_HEADER = 100_000_000
GGUF = b"GGUF"
"""First bytes of a GGUF file."""
COMPARED_AT_ONCE = 16 << 20


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a checkpoint.

    Attributes:
        file: the file that holds it.
        dtype: as the header writes it ("BF16", ...).
        shape: its shape.
        begin, end: range of its bytes in the file.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Properties of the weight files that config mappings need; None if there is no such tensor.

    Attributes:
        embedding, head: rows of the stored matrices.
        prefix: of the names of the decoder's tensors ("model.", ...).
        dtype: of the embedding ("float32", "bfloat16", ...).
    """

    embedding: int | None = None
    head: int | None = None
    dtype: str | None = None
    prefix: str | None = None


def has_weights(folder: Path) -> bool:
    """Whether the folder holds safetensors weights."""
    return (folder / SINGLE).is_file() or (folder / INDEX).is_file()


def read_headers(folder: Path) -> dict[str, TensorEntry]:
    """Every tensor of the folder, or of a GGUF file, by name, from the headers alone. A single
    file takes precedence over an index, which may be left over from another form of the checkpoint.

    Raises:
        BadModel: no safetensors weights, a truncated or corrupt file, an index that disagrees
            with its shards.
    """
    if is_gguf(folder):
        return _read_gguf(folder)
    if (folder / SINGLE).is_file():
        return _read_file(folder / SINGLE)
    if (folder / INDEX).is_file():
        return _read_sharded(folder)
    pickled = sorted(path.name for pattern in PICKLED for path in folder.glob(pattern))
    if pickled:
        raise BadModel(
            f"{folder} holds only pickled weights ({pickled[0]}), which can run code when opened",
            "Convert them to model.safetensors",
        )
    others = sorted(path.name for pattern in UNREAD for path in folder.glob(pattern))
    found = f" that are read, only {', '.join(others[:3])}" if others else ""
    raise BadModel(
        f"{folder} holds no weights{found}", f"Put {SINGLE} (or shards with {INDEX}) there"
    )


def stored_rows(entries: dict[str, TensorEntry]) -> StoredRows:
    """Row counts of embedding and head, and the embedding's dtype."""
    # In multimodal checkpoints the decoder has a longer name prefix.
    tables = [n for n in entries if re.match(r"(language_)?model\.(.*\.)?embed_tokens\.weight$", n)]
    table = min(tables, key=len, default="embed.weight")
    embedding = entries.get(table)
    head = entries.get("lm_head.weight", entries.get("head.weight"))
    return StoredRows(
        prefix=table.removesuffix("embed_tokens.weight") if tables else None,
        embedding=embedding.shape[0] if embedding and embedding.shape else None,
        head=head.shape[0] if head and head.shape else None,
        dtype=CONVERTIBLE.get(embedding.dtype) if embedding else None,
    )


def same_numbers(a: TensorEntry, b: TensorEntry) -> bool:
    """Whether two stored tensors are the same, byte by byte."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    with a.file.open("rb") as one, b.file.open("rb") as other:
        one.seek(a.begin)
        other.seek(b.begin)
        left = a.end - a.begin
        while left > 0:
            count = min(left, COMPARED_AT_ONCE)
            if one.read(count) != other.read(count):
                return False
            left -= count
    return True


def is_gguf(path: Path) -> bool:
    """Whether a path is a GGUF file."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(GGUF)) == GGUF


def _read_gguf(path: Path) -> dict[str, TensorEntry]:
    from cairn.models.gguf_file import GgufFile

    file = GgufFile(path)
    return {
        name: TensorEntry(path, file.dtype(name), part.shape, *file.span(name))
        for name, part in file.tensors.items()
    }


def _read_sharded(folder: Path) -> dict[str, TensorEntry]:
    try:
        weights = json.loads((folder / INDEX).read_text("utf-8-sig"))["weight_map"]
        files = sorted(set(weights.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadModel(f"{folder / INDEX} is corrupt: {error}", "Copy it again") from None
    found: dict[str, TensorEntry] = {}
    for name in files:
        # A shard is a file beside the index; a path that leaves the folder is not followed.
        if Path(name).name != name or not (folder / name).is_file():
            raise BadModel(
                f"{folder / INDEX} names {name!r}, which is not in the folder", "Copy it"
            )
        found |= _read_file(folder / name)
    wrong = [
        name
        for name in sorted(set(weights) | set(found))
        if name not in found or weights.get(name) != found[name].file.name
    ]
    if wrong:
        shown = ", ".join(
            f"{name} (index: {weights.get(name, 'absent')}, "
            f"found: {found[name].file.name if name in found else 'nowhere'})"
            for name in wrong[:5]
        )
        raise BadModel(
            f"{folder / INDEX} disagrees with its shards about {len(wrong)} tensors: {shown}",
            "Copy index and shards again from the same place",
        )
    return found


def _read_file(path: Path) -> dict[str, TensorEntry]:
    size = path.stat().st_size
    header, start = _header(path, size)
    entries: dict[str, TensorEntry] = {}
    end = start
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            first, last = (start + int(offset) for offset in entry["data_offsets"])
            shape = tuple(int(n) for n in entry["shape"])
            dtype = str(entry["dtype"])
        except (KeyError, TypeError, ValueError):
            raise _corrupt(path, f"the entry of {name} is unreadable") from None
        if dtype in ELEMENT_BYTES and last - first != prod(shape) * ELEMENT_BYTES[dtype]:
            raise _corrupt(path, f"{name} has the wrong number of bytes")
        end = max(end, last)
        entries[name] = TensorEntry(path, dtype, shape, first, last)
    if end != size:
        raise BadModel(
            f"{path} is truncated or corrupt: it has {size} bytes, its header says {end}",
            "Copy the file again",
        )
    return entries


def _header(path: Path, size: int) -> tuple[dict[str, Any], int]:
    """The parsed header and the offset of the data."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER):
            raise _corrupt(path, f"{size} bytes cannot hold its header")
        try:
            header = json.loads(file.read(length))
        except ValueError:
            raise _corrupt(path, "its header is not JSON") from None
    if not isinstance(header, dict):
        raise _corrupt(path, "its header is not an object")
    return header, 8 + length


def _corrupt(path: Path, why: str) -> BadModel:
    return BadModel(f"{path} is truncated or corrupt: {why}", "Copy the file again")
