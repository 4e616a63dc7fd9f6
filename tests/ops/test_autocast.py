"""Ops within torch.autocast."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn import ops
from cairn.ops.registry import op


def toy_product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a b, in its dtype."""
    return torch.mm(a, b)


def test_no_dtype_changes_within_an_op() -> None:
    made = op(toy_product)
    a, b = torch.full((2, 2), 1 + 2.0**-20), torch.eye(2)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert (a @ b).dtype == torch.bfloat16
            out = torch.empty(2, 2)
            results = made(a, b), made(a, b, out=out), made.registered(a, b), out.clone()
            made.registered_out(a, b, out=out.zero_())
            assert torch.is_autocast_enabled("cpu")
        assert all(torch.equal(result, a) for result in (*results, out))
    finally:
        made.unregister()


def test_a_definition_of_attention_gives_what_it_gives_without() -> None:
    q = torch.randn(1, 3, 2, 64).bfloat16()
    expected = ops.flash_attn_with_kvcache(q, q, q, softcap=15.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(ops.flash_attn_with_kvcache(q, q, q, softcap=15.0), expected)
