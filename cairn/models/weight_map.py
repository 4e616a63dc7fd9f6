"""Which stored tensor fills which parameter. No torch.

Projections that read the same input share one parameter; their tensors fill it row by row.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from cairn.models.spec import HilsSpec, LayerSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor of the checkpoint goes.

    Attributes:
        shape: its shape in the file.
        target: name of the parameter; None: accounted for and ignored.
        start: first row of the parameter it fills.
        rows: rows it fills, with the first rows of the tensor (or with a vector, as one row);
            None: as many as the tensor has.
        required: a checkpoint without it is incomplete.
    """

    shape: tuple[int, ...]
    target: str | None
    start: int = 0
    rows: int | None = None
    required: bool = True


WeightMap = dict[str, StoredTensor]


def weight_map(spec: ModelSpec) -> WeightMap:
    """Every tensor a checkpoint of this model may hold, by its published name."""
    hidden, vocab = spec.hidden_size, spec.vocab_size
    # Without a row of its own the landmark's embedding is row V of the table. With one it is put
    # there, so that id V needs no special case and can never index past the table.
    rows = vocab if spec.external_landmark else spec.table_rows
    tensors: WeightMap = {
        "model.embed_tokens.weight": StoredTensor(
            (spec.embedding_rows, hidden), "embedding.weight", rows=rows
        )
    }
    if spec.external_landmark:
        tensors["model.lmk_embed"] = StoredTensor(
            (hidden,), "embedding.weight" if spec.landmarks else None, start=vocab, rows=1
        )
    tensors["model.norm.weight"] = StoredTensor((hidden,), "norm.weight")
    head = StoredTensor((spec.head_rows, hidden), "head.weight", rows=vocab)
    if spec.tied:
        head = StoredTensor((spec.embedding_rows, hidden), None, required=False)
    tensors["lm_head.weight"] = head
    for i, layer in enumerate(spec.layers):
        tensors |= _block(spec, layer, f"model.layers.{i}.", f"layers.{i}.")
    return tensors


def parameter_count(spec: ModelSpec) -> int:
    """Parameters of the checkpoint: padding rows counted, a tied head counted once."""
    return sum(prod(t.shape) for t in weight_map(spec).values() if t.target is not None)


def _block(spec: ModelSpec, layer: LayerSpec, source: str, target: str) -> WeightMap:
    hidden, inter = spec.hidden_size, spec.intermediate_size
    # The name post_attention_layernorm means the attention's output in a post-norm block and the
    # MLP's input in a pre-norm block.
    names = (
        ("post_attention_layernorm", "post_feedforward_layernorm")
        if spec.post_norm
        else ("input_layernorm", "post_attention_layernorm")
    )
    tensors = {
        f"{source}{names[0]}.weight": StoredTensor((hidden,), f"{target}attention_norm.weight"),
        f"{source}{names[1]}.weight": StoredTensor((hidden,), f"{target}mlp_norm.weight"),
    }
    gate_up, down = f"{target}mlp.gate_up.weight", f"{target}mlp.down.weight"
    tensors |= {
        f"{source}mlp.gate_proj.weight": StoredTensor((inter, hidden), gate_up),
        f"{source}mlp.up_proj.weight": StoredTensor((inter, hidden), gate_up, start=inter),
        f"{source}mlp.down_proj.weight": StoredTensor((hidden, inter), down),
    }
    hils = spec.hils if layer.kind == "hils" else None
    return tensors | _attention(spec, layer, hils, f"{source}self_attn.", f"{target}attention.")


def _attention(
    spec: ModelSpec, layer: LayerSpec, hils: HilsSpec | None, source: str, target: str
) -> WeightMap:
    hidden, head_dim = spec.hidden_size, spec.head_dim
    q_width, kv_width = spec.num_heads * head_dim, spec.num_kv_heads * head_dim
    tensors: WeightMap = {}
    start = 0
    # Queries, keys and landmark queries side by side: their heads are normed and rotated in one op.
    fused = [("q_proj", q_width), ("k_proj", kv_width), ("v_proj", kv_width)]
    if hils is not None and hils.lmk_q == "full":
        fused.insert(2, ("lmk_q_proj", q_width))
    if hils is not None and hils.lmk_q == "lora":
        fused.append(("lmk_q_proj.0", hils.lora_rank))
    for name, width in fused:
        tensors[f"{source}{name}.weight"] = StoredTensor(
            (width, hidden), f"{target}qkv.weight", start
        )
        if layer.bias:
            tensors[f"{source}{name}.bias"] = StoredTensor((width,), f"{target}qkv.bias", start)
        start += width
    tensors[f"{source}o_proj.weight"] = StoredTensor((hidden, q_width), f"{target}out.weight")
    if layer.bias:
        tensors[f"{source}o_proj.bias"] = StoredTensor((hidden,), f"{target}out.bias")
    if layer.qk_norm is not None:
        for name, width in (("q_norm", q_width), ("k_norm", kv_width)):
            shape = (width if layer.qk_norm == "full" else head_dim,)
            tensors[f"{source}{name}.weight"] = StoredTensor(shape, f"{target}{name}.weight")
    if hils is not None:
        tensors |= _landmark_query(hils, (q_width, head_dim), source, target)
    return tensors


def _landmark_query(hils: HilsSpec, widths: tuple[int, int], source: str, target: str) -> WeightMap:
    q_width, head_dim = widths
    tensors: WeightMap = {}
    if hils.lmk_q == "lora":
        tensors[f"{source}lmk_q_proj.1.weight"] = StoredTensor(
            (q_width, hils.lora_rank), f"{target}lmk_q_up.weight"
        )
    if hils.lmk_q is not None and not hils.shared_lmk_q_norm:
        shape = (q_width if hils.lmk_q_norm == "full" else head_dim,)
        tensors[f"{source}lmk_q_norm.weight"] = StoredTensor(shape, f"{target}lmk_q_norm.weight")
    if hils.shared_query:
        tensors[f"{source}q_c"] = StoredTensor((q_width // head_dim, head_dim), f"{target}q_c")
    return tensors
