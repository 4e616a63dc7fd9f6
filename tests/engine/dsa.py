"""Records which tokens layers of latent attention select, and their outputs, while an engine
runs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cairn import ops
from cairn.attention.mla import MlaBackend
from cairn.engine.build import Built
from cairn.models.registry import load_spec
from tests.engine.harness import engine, text
from tests.specs import declared

GOLDENS = Path(__file__).parent.parent / "data" / "goldens" / "dsa"
CASES = sorted(path.name for path in GOLDENS.iterdir() if path.is_dir())

Place = tuple[int, int, int]
"""(layer, row of the page table, slot)."""

TOPK, PAGE = 32, 16
BLOCK: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 96,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "index_n_heads": 16,
    "index_head_dim": 64,
    "index_topk": TOPK,
    "intermediate_size": 192,
    "first_k_dense_replace": 3,
    "rope_scaling": None,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
FAMILIES = {
    "every layer selects": {"model_type": "deepseek_v32"},
    "layers share": {
        "model_type": "glm_moe_dsa",
        "indexer_types": ["full", "shared", "full"],
    },
}
FORMATS = ("auto", "fp8_ds")


def made(folder: Path, family: str, **options: Any) -> Built:
    """An engine with random weights, generated on the device or read from the folder."""
    if options.get("load_format") != "auto":
        (folder / "config.json").write_text(json.dumps(BLOCK | FAMILIES[family]), encoding="utf-8")
    given = {
        "load_format": "random",
        "device": "cuda",
        "page_size": PAGE,
        "max_num_seqs": 12,
        "max_model_len": 1024,
        "kv_cache_memory": "32MiB",
    }
    return engine(str(folder), **given | options)


def store(folder: Path, config: dict[str, Any]) -> None:
    """A model folder with random weights, equal on every device."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    generator, tensors = torch.Generator().manual_seed(3), {}
    for name, stored in declared(load_spec(folder)).items():
        noise = torch.randn(stored.shape, generator=generator)
        matrix = stored.shape[-1] ** -0.5 * noise
        tensors[name] = 1 + 0.1 * noise if "norm.weight" in name else matrix
    save_file(tensors, folder / "model.safetensors")


def prompts_of(seed: int) -> list[list[int]]:
    """Prompt lengths below, at and above top-k, across a page border and far beyond it."""
    lengths = (3, TOPK - 1, TOPK, TOPK + 1, 5 * PAGE, 300, 613)
    return [text(seed + i, length, 250) for i, length in enumerate(lengths)]


class Seen:
    """What layers selected and computed, by place.

    Attributes:
        selected: positions, ascending.
        index_logits: [slot + 1] scores of a query with more visible tokens than it may select.
        attn_out: [H * dv], the attention's output before its last product.
        rows: in the order in which they first ran: that of the requests, where none waits.
    """

    def __init__(self, built: Built) -> None:
        self.selected: dict[Place, list[int]] = {}
        self.index_logits: dict[Place, Tensor] = {}
        self.attn_out: dict[Place, Tensor] = {}
        self.rows: list[int] = []
        self.mixers = built.spec.mixers
        self.full = [i for i, mixer in enumerate(self.mixers) if mixer.indexer is not None]
        self._layer, self._places = 0, [(0, 0)]

    def began(self, layer: int, plan: Any) -> None:
        """A layer runs. All tokens that its queries see count as selected, unless `select` is
        called."""
        rows, slots = plan.batch.row.tolist(), plan.batch.slot.tolist()
        self.rows += [row for row in dict.fromkeys(rows) if row not in self.rows]
        self._layer, self._places = layer, list(zip(rows, slots, strict=True))
        if layer in self.full:
            for row, slot in self._places:
                self.selected[layer, row, slot] = list(range(slot + 1))

    def chose(self, logits: Tensor, page_table: Tensor, size: int, cells: Tensor) -> None:
        """The layer selected cells [T, topk] by logits [T, width]."""
        assert len(cells) == len(self._places), "one block"
        for line, (row, slot) in enumerate(self._places):
            place = self._layer, row, slot
            logical = {
                page: i for i, page in enumerate(page_table[row].tolist()) if i <= slot // size
            }
            own = [cell for cell in cells[line].tolist() if cell >= 0]
            self.selected[place] = [logical[cell // size] * size + cell % size for cell in own]
            self.index_logits[place] = logits[line, : slot + 1].cpu().clone()

    def gave(self, x: Tensor) -> None:
        """The layer's output [T, H * dv]."""
        for line, (row, slot) in enumerate(self._places):
            self.attn_out[self._layer, row, slot] = x[line].cpu().clone()

    def sets(self, row: int, slots: range, topk: int) -> Tensor:
        """[F, slots, topk] int16, -1 after the selected positions, in the format of the goldens."""
        lines = [[self.selected[layer, row, slot] for slot in slots] for layer in self.full]
        padded = [[own + [-1] * (topk - len(own)) for own in layer] for layer in lines]
        return torch.tensor(padded, dtype=torch.int16)


@contextlib.contextmanager
def watched(built: Built) -> Iterator[Seen]:
    """Context manager: record what the engine's layers select and compute."""
    seen, run, select = Seen(built), MlaBackend.run, ops.select_topk

    def running(self, layer, inputs, plan):
        seen.began(layer, plan)
        return run(self, layer, inputs, plan)

    def selecting(logits, count, topk, start, page_table, row, page_size):
        cells = select(logits, count, topk, start, page_table, row, page_size)
        seen.chose(logits, page_table, page_size, cells)
        return cells

    hooks = [
        block.mixer.register_forward_hook(lambda _module, _args, delta: seen.gave(delta.x))
        for block in built.runner.model.layers
    ]
    with (
        patch.object(MlaBackend, "run", running),
        patch.object(ops, "select_topk", selecting),
    ):
        yield seen
    for hook in hooks:
        hook.remove()


def golden(folder: Path) -> dict[int, dict[str, Tensor]]:
    """The reference outputs of a case, by prompt length."""
    found: dict[int, dict[str, Tensor]] = {}
    for name, value in load_file(folder / "vectors.safetensors").items():
        length, field = name[1:].split(".", 1)
        found.setdefault(int(length), {})[field] = value
    return found
