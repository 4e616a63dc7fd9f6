"""Recognises folders and files that are not a model folder, for helpful errors."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from cairn.errors import BadModel
from cairn.models.checkpoint import INDEX, SINGLE
from cairn.models.fields import refuse

PLAIN_WEIGHTS = "Use the float32, bfloat16 or float16 checkpoint"
QUANTIZATION_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
QUANTIZED_TENSOR = re.compile(
    r"\.(scales|biases|qweight|qzeros|g_idx|weight_(scale(_inv|_2)?|packed|shape|zero_point)"
    r"|input_scale|SCB|absmax|weight\.(absmax|quant_[\w.]+))$"
)
"""Names that MLX, GPTQ, AWQ, compressed-tensors, ModelOpt and bitsandbytes give to scales and zero
points of quantized weights."""
LFS_POINTER = b"version https://git-lfs"
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


def refuse_other_paths(path: Path) -> None:
    """Raise BadModel unless the path can be a model folder.

    Raises:
        BadModel: it is not a folder, or another kind of folder; the hint names the path to give.
    """
    if path.is_file():
        raise _refused_file(path)
    if not path.is_dir():
        hint = "Give the folder that holds config.json and weights"
        if REPOSITORY.fullmatch(str(path)):
            hint = (
                f"If it is a repository's name, nothing is downloaded here: "
                f"hf download {path} --local-dir {path.name}, then give that folder"
            )
        raise BadModel(f"{path} is not a folder", hint)
    adapter = path / "adapter_config.json"
    if adapter.is_file():
        raise BadModel(
            f"{path} holds a LoRA adapter ({adapter.name}), which is not applied here",
            f"Merge it into its base model{_base_of(adapter)} and give the merged folder",
        )
    if (path / "config.json").is_file():
        return
    for name, what in (
        ("model_index.json", "a diffusion pipeline"),
        ("params.json", "a checkpoint in its author's own form"),
    ):
        if (path / name).is_file():
            raise BadModel(
                f"{path} has no config.json: it holds {what} ({name})",
                "Give a model in Hugging Face's form: config.json and safetensors",
            )
    inner = _inner_folder(path)
    if inner is not None:
        raise BadModel(f"{path} has no config.json, but a folder in it has", f"Give {inner}")
    ggufs = sorted(path.glob("*.gguf"))
    if ggufs:
        raise _refused_gguf(ggufs[0])


def refuse_other_weights(folder: Path) -> None:
    """Raise BadModel for weights in another form than safetensors.

    Raises:
        BadModel: the weights are in a file of another kind, or were never fetched.
    """
    shards = sorted(folder.glob("*.safetensors"))
    for shard in shards:
        with shard.open("rb") as file:
            if file.read(len(LFS_POINTER)) == LFS_POINTER:
                raise BadModel(
                    f"{shard} is a pointer of Git LFS, not the weights",
                    "Run git lfs pull in the folder, or download it with hf download",
                )
    known = (folder / SINGLE).is_file() or (folder / INDEX).is_file()
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs and not known:
        raise _refused_gguf(ggufs[0])


def refuse_quantized(config: Mapping[str, Any], folder: Path, tensors: Collection[str]) -> None:
    """Raise BadModel for quantized weights that no scheme reads, wherever the folder declares them.

    Args:
        config: the parsed config.json.
        folder: the model folder.
        tensors: names of the stored tensors.

    Raises:
        BadModel: a field of config.json, a file or a tensor says that they are.
    """
    for name, value in config.items():
        # The mapping of the model's own type refuses quantization_config, by its method.
        marked = "quant" in name.lower() or name == "compression_config"
        if marked and value and name != "quantization_config":
            raise refuse(name, value, "quantized weights are not supported", PLAIN_WEIGHTS)
    if not tensors:
        return
    told = bool(config.get("quantization_config"))
    for name in QUANTIZATION_FILES:
        if (folder / name).is_file() and not told:
            raise BadModel(f"{folder} has {name}: its weights are quantized", PLAIN_WEIGHTS)
    quantized = next((name for name in sorted(tensors) if QUANTIZED_TENSOR.search(name)), None)
    if quantized is not None and not told:
        raise BadModel(f"the weights in {folder} are quantized: {quantized}", PLAIN_WEIGHTS)


def _refused_file(path: Path) -> BadModel:
    if path.suffix == ".gguf":
        return BadModel(f"{path} does not begin as a GGUF file", "Copy the file again")
    return BadModel(f"{path} is not a folder", f"Give the folder that holds it: {path.parent}")


def _refused_gguf(path: Path) -> BadModel:
    return BadModel(
        f"{path.parent} holds a GGUF file, {path.name}, in place of config.json and safetensors",
        f"Give the file: {path}",
    )


def _base_of(adapter: Path) -> str:
    try:
        content = json.loads(adapter.read_text(encoding="utf-8-sig"))
        name = content["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError):
        return ""
    return f" ({name})" if isinstance(name, str) else ""


def _inner_folder(path: Path) -> Path | None:
    """A folder below that has a config.json, the newest of several: a snapshot in the cache of
    Hugging Face's hub, a checkpoint in a training's output."""
    found = [*path.glob("*/config.json"), *path.glob("snapshots/*/config.json")]
    folders = [config.parent for config in found if config.is_file()]
    return max(folders, key=lambda folder: folder.stat().st_mtime, default=None)
