"""Gated delta nets: causal convolution, gates and the delta rule with its recurrent states.

The functions of sgl-kernel's module `mamba` are importable from `cairn.ops.mamba` too.
"""

from cairn.ops.mamba.causal_conv1d_cpu import causal_conv1d_fn_cpu, causal_conv1d_update_cpu
from cairn.ops.mamba.causal_conv1d_fwd import causal_conv1d_fwd
from cairn.ops.mamba.causal_conv1d_rows import causal_conv1d_rows
from cairn.ops.mamba.causal_conv1d_update import causal_conv1d_update
from cairn.ops.mamba.chunk_gated_delta_rule import (
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_cpu,
)
from cairn.ops.mamba.fused_gdn_gating import fused_gdn_gating
from cairn.ops.mamba.fused_qkvzba_split_reshape_cat import (
    fused_qkvzba_split_reshape_cat,
    fused_qkvzba_split_reshape_cat_contiguous,
)
from cairn.ops.mamba.fused_sigmoid_gating_delta_rule_update import (
    fused_sigmoid_gating_delta_rule_update,
)
from cairn.ops.mamba.gated_delta_rule_rows import gated_delta_rule_rows
from cairn.ops.mamba.ragged_rows import ragged_rows

__all__ = [
    "causal_conv1d_fn_cpu",
    "causal_conv1d_fwd",
    "causal_conv1d_rows",
    "causal_conv1d_update",
    "causal_conv1d_update_cpu",
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_cpu",
    "fused_gdn_gating",
    "fused_qkvzba_split_reshape_cat",
    "fused_qkvzba_split_reshape_cat_contiguous",
    "fused_sigmoid_gating_delta_rule_update",
    "gated_delta_rule_rows",
    "ragged_rows",
]
