"""Files of cairn in the folder of Triton's compile cache: facts about the kernels cached there."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from cairn.ops import gpu
from cairn.ops.overrides import FORCED


def cache_path(subject: object, device: torch.device) -> Path | None:
    """Path of the JSON file about a subject; None if Triton has no cache folder.

    The name is a hash of repr(subject), cairn's sources, the versions of torch and Triton, the
    device's properties and the forced implementations, so a change of any of them gives another
    file.
    """
    folder = gpu.cache_folder()
    if folder is None:
        return None
    package = Path(__file__).parents[1]
    states = ((path, path.stat()) for path in sorted(package.rglob("*.py")))
    sources = [(str(path), state.st_mtime_ns, state.st_size) for path, state in states]
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    versions = gpu.version(), torch.__version__
    key = repr((subject, sources, versions, str(properties), sorted(FORCED.items())))
    return folder / f"cairn-{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
