"""What an op refuses: one error that names the argument, before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cairn import ops
from cairn.errors import BadArgument
from cairn.ops.registry import Op, all_ops
from cairn.ops.testing import Arguments, cases_of

SCRATCH = ("workspace",)
"""Arguments without effect."""
ORDERED_BY_TORCH = ("fast_topk",)
"""Takes every dtype that torch orders."""
COPIES = ("put_integers",)
"""Goes from one device to another."""
CHECKED = [pytest.param(op, id=op.name) for op in all_ops() if op._check is not None]


def broken(op: Op[..., Any], change: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Arguments]]:
    """Calls with one tensor changed, and which."""
    given = next(case for case in cases_of(op) if all(_sizes(case)))
    named = given.clone().named(list(op.__signature__.parameters))
    for name, value in named.items():
        if isinstance(value, Tensor):
            yield name, Arguments((), {**named, name: change(value)})


def _sizes(case: Arguments) -> list[int]:
    return [v.numel() for v in (*case.args, *case.kwargs.values()) if isinstance(v, Tensor)]


@pytest.mark.parametrize("op", CHECKED)
def test_a_dtype_of_no_use_is_refused(op: Op[..., Any]) -> None:
    for name, arguments in broken(op, lambda x: x.to(torch.complex64)):
        if name not in SCRATCH and op.name not in ORDERED_BY_TORCH:
            with pytest.raises(BadArgument, match="` is .*complex64"):
                op(*arguments.args, **arguments.kwargs)


@pytest.mark.parametrize("op", CHECKED)
def test_another_device_is_refused(op: Op[..., Any]) -> None:
    for name, arguments in broken(op, lambda x: x.to("meta")):
        if len(_sizes(arguments)) > 1 and name not in SCRATCH and op.name not in COPIES:
            with pytest.raises(BadArgument, match="` lies on "):
                op(*arguments.args, **arguments.kwargs)


def f(*shape: int) -> Tensor:
    return torch.ones(shape)


def i(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


QKV = (2, 1, 1, 4, 1e-6, f(4), f(4), 1e4, True)
SHAPES: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], str]] = [
    (ops.rmsnorm, (f(3, 4), f(5)), {}, "rmsnorm: argument `weight` has shape [5], not [4]"),
    (ops.rmsnorm, (f(3, 4), f(4)), {"out": f(3, 5)}, "`out` has shape [3, 5], not [3, 4]"),
    (ops.rmsnorm, (f(3, 0), f(0)), {}, "`input` has shape [3, 0]"),
    (ops.rmsnorm, (f(3, 4), f(8)[::2]), {}, "`weight` has strides [2]"),
    (ops.gemma_rmsnorm, (f(3, 4), f(4).half()), {}, "`weight` is float16, not float32"),
    (ops.rmsnorm_hf, (f(), f(4)), {}, "rmsnorm_hf: argument `input` has shape []"),
    (ops.fused_add_rmsnorm, (f(3, 4), f(2, 4), f(4)), {}, "`residual` has shape [2, 4]"),
    (ops.gemma_fused_add_rmsnorm, (f(3, 4), f(3, 4).half(), f(4)), {}, "`residual` is float16"),
    (ops.fused_inplace_qknorm, (f(3, 2, 4), f(2, 1, 4), f(4), f(4)), {}, "`k` has shape [2, 1, 4]"),
    (ops.fused_inplace_qknorm, (f(3, 9), f(3, 4), f(4), f(4)), {"head_dim": 4}, "`q` has shape"),
    (ops.fused_inplace_qknorm_across_heads, (f(3, 4), f(3, 2), f(4), f(4)), {}, "`k_weight` has"),
    (ops.silu_and_mul, (f(3, 5),), {}, "`input` has shape [3, 5], not [..., 2d]"),
    (ops.gelu_and_mul, (f(3, 8),), {"out": f(3, 8)}, "`out` has shape [3, 8], not [3, 4]"),
    (ops.gelu_tanh_and_mul, (f(5, 8),), {"expert_ids": i(2), "expert_step": 2}, "`expert_ids` has"),
    (ops.gelu_quick, (f(3, 8),), {"out": f(3, 4)}, "`out` has shape [3, 4], not [3, 8]"),
    (ops.rotary_embedding, (i(3), f(4, 8), None, 4, f(9, 4)), {}, "`query` has shape [4, 8]"),
    (ops.rotary_embedding, (i(3), f(3, 8), f(3, 6), 4, f(9, 4)), {}, "`key` has shape [3, 6]"),
    (ops.rotary_embedding, (i(3), f(3, 8), None, 4, f(9, 6)), {}, "`cos_sin_cache` has 6 columns"),
    (ops.fused_qk_norm_rope, (f(3, 15), *QKV, i(3), 1, 1, 2, 1), {}, "`qkv` has shape [3, 15]"),
    (ops.fused_qk_norm_rope, (f(3, 16), *QKV, i(2), 1, 1, 2, 1), {}, "`position_ids` has shape"),
    (ops.fused_qk_norm_rope, (f(3, 16), *QKV, i(3), 1, 1, 2, 1, 3), {}, "`rotary_dim` is 3"),
    (ops.fp8_quantize, (f(3),), {"fp8_dtype": torch.int8}, "`fp8_dtype` is torch.int8"),
    (ops.downcast_fp8, (f(3, 1, 2), f(3, 1, 2), f(9, 2), f(9, 2), None, None, i(3)), {}, "`k_out`"),
    (ops.hadamard_transform, (f(3, 0),), {}, "`x` has shape [3, 0]"),
    (ops.clamp_position, (f(3),), {}, "`seq_lens` is float32, not int32 or int64"),
    (ops.resolve_future_token_ids, (i(3), i(3).int()), {}, "`future_map` is int32, not int64"),
    (ops.fixup_zero_kv_rows, (f(3, 1, 2), f(3, 1), i(2), i(2), 3), {}, "`cum_seq_lens` has shape"),
    (ops.copy_to_gpu_no_ce, (i(3).int(), i(4).int()), {}, "`output` has shape [4], not [3]"),
    (ops.top_k_renorm_probs, (f(3, 4), i(2)), {}, "`top_k` has shape [2], not [3]"),
    (ops.top_p_renorm_probs, (f(4), 0.5), {}, "`probs` has shape [4], not [any, any]"),
    (ops.top_k_mask_logits, (f(3, 0), 1), {}, "`logits` has shape [3, 0]"),
]


@pytest.mark.parametrize("call, args, kwargs, said", SHAPES)
def test_what_does_not_fit_is_named(
    call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], said: str
) -> None:
    before = [arg.clone() for arg in args if isinstance(arg, Tensor)]
    with pytest.raises(BadArgument) as refused:
        call(*args, **kwargs)
    assert said in str(refused.value)
    after = [arg for arg in args if isinstance(arg, Tensor)]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
