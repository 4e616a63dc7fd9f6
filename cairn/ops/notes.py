"""Notes beside Triton's cache: what is known of kernels that lie there."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from cairn.ops import gpu
from cairn.ops.forced import FORCED


def note_of(subject: object, device: torch.device) -> Path | None:
    """Where a note about a subject is kept, told by its repr. It holds for these sources of cairn,
    versions and device: with others it is another file. None: kernels are not kept.
    """
    folder = gpu.cache_folder()
    if folder is None:
        return None
    package = Path(__file__).parents[1]
    states = ((path, path.stat()) for path in sorted(package.rglob("*.py")))
    sources = [(str(path), state.st_mtime_ns, state.st_size) for path, state in states]
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    versions = gpu.version(), torch.__version__
    known = repr((subject, sources, versions, str(properties), sorted(FORCED.items())))
    return folder / f"cairn-{hashlib.sha256(known.encode()).hexdigest()[:32]}.json"
