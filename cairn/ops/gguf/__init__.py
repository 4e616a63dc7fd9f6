"""Matrix products with GGUF-quantised weights, under sgl-kernel's names."""

from cairn.ops.gguf.ggml import (
    ggml_dequantize,
    ggml_moe_a8,
    ggml_moe_a8_vec,
    ggml_moe_get_block_size,
    ggml_mul_mat_a8,
    ggml_mul_mat_vec_a8,
)

__all__ = [
    "ggml_dequantize",
    "ggml_moe_a8",
    "ggml_moe_a8_vec",
    "ggml_moe_get_block_size",
    "ggml_mul_mat_a8",
    "ggml_mul_mat_vec_a8",
]
