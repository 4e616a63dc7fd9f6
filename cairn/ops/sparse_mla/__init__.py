"""DeepSeek sparse attention: the indexer's keys and scores, the selection, latent attention."""

from cairn.ops.sparse_mla.fused_store_index_k_cache import fused_store_index_k_cache
from cairn.ops.sparse_mla.index_k_gather import index_k_gather
from cairn.ops.sparse_mla.index_k_store import index_k_store
from cairn.ops.sparse_mla.index_q_quantize import index_q_quantize
from cairn.ops.sparse_mla.latent_norm_rope import latent_norm_rope
from cairn.ops.sparse_mla.latent_query_rope import latent_query_rope
from cairn.ops.sparse_mla.mla_kv_store import mla_kv_store
from cairn.ops.sparse_mla.paged_mla import paged_mla
from cairn.ops.sparse_mla.paged_mqa_logits import paged_mqa_logits
from cairn.ops.sparse_mla.ragged_mqa_logits import ragged_mqa_logits
from cairn.ops.sparse_mla.select_topk import select_topk
from cairn.ops.sparse_mla.set_mla_kv_buffer import set_mla_kv_buffer
from cairn.ops.sparse_mla.sparse_mla import sparse_mla

__all__ = [
    "fused_store_index_k_cache",
    "index_k_gather",
    "index_k_store",
    "index_q_quantize",
    "latent_norm_rope",
    "latent_query_rope",
    "mla_kv_store",
    "paged_mla",
    "paged_mqa_logits",
    "ragged_mqa_logits",
    "select_topk",
    "set_mla_kv_buffer",
    "sparse_mla",
]
