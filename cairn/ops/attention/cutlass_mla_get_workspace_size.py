"""Workspace size of `cutlass_mla_decode`, computed on the host."""

from __future__ import annotations

from cairn.ops.checks import refuse


def cutlass_mla_get_workspace_size(
    max_seq_len: int, num_batches: int, sm_count: int = 0, num_kv_splits: int = 1
) -> int:
    """Bytes of workspace for `cutlass_mla_decode`: always 1, because it allocates its workspace
    through torch.

    Args:
        max_seq_len, num_batches: sizes of later calls, >= 0.
        sm_count: ignored.
        num_kv_splits: ignored.
    Raises:
        BadArgument: a negative length or count.
    """
    for name, number in (("max_seq_len", max_seq_len), ("num_batches", num_batches)):
        if number < 0:
            refuse("cutlass_mla_get_workspace_size", name, f"is {number}, not at least 0")
    return 1
