"""Invalid arguments raise one error that names the argument, before anything runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from cairn import ops
from cairn.errors import BadArgument
from cairn.ops.cache.quantized import BYTES
from cairn.ops.checks import naming
from cairn.ops.registry import Op, all_ops
from cairn.ops.testing import Arguments, cases_of
from cairn.train.sequence import sequence_attention

SCRATCH = ("workspace",)
"""Arguments that are ignored."""
ORDERED_BY_TORCH = ("fast_topk",)
"""Accepts every dtype that torch can sort."""
COPIES = ("put_integers",)
"""Ops that copy between devices."""
CHECKED = [pytest.param(op, id=op.name) for op in all_ops() if op._check is not None]
FREE = {
    "apply_logit_bias": "logits:0 logits:1",
    "apply_penalties": "",
    "argmax_tokens": "logits:0 logits:1",
    "blend_window": "",
    "counter_uniform": "",
    "decode_slots": "last_token:0 tables:0 tables:1",
    "dense_attention": "page_table:0 page_table:1",
    "draw_tokens": "logits:1",
    "gated_linear": "input:0",
    "head_norm_rope": "",
    "heads_into_cache": "projected:1",
    "index_k_gather": "cache:0 cache:1 location:0",
    "index_k_store": "cache:0 cache:1",
    "index_q_quantize": "q:2",
    "landmark_attention": "page_table:0 page_table:1",
    "latent_norm_rope": "",
    "latent_query_rope": "projected:1 q:1 q:2 weights:1",
    "linear": "input:0 input:rank",
    "linear_add": "",
    "mean_summary": "k_cache:0 k_cache:1 k_cache:2 k_cache:3 pages:0",
    "mla_kv_store": "cache:0 cache:1",
    "page_attention": "page_table:0 page_table:1",
    "page_weights": "scores:2",
    "paged_mla": "q:1 cache:0 cache:1 page_table:0 page_table:1",
    "paged_mqa_logits_into": "cache:0 cache:1 page_table:0 page_table:1 logits:1",
    "prior_summary": "k_cache:0 k_cache:2",
    "ragged_mqa_logits_into": "",
    "ring_read": "ring:0",
    "ring_write": "values:0 ring:0 ring:1 kept:0",
    "rotary_cos_sin": "positions:0 inv_freq:0",
    "score_tokens": "logits:1",
    "select_pages": "page_table:0 page_table:1",
    "select_topk": "logits:1 page_table:0 page_table:1",
    "sequence_attention": "",
    "sparse_mla": "q:1 cache:0 cache:1 cells:1 extra_cache:0 extra_cache:1 extra_cells:1",
    "split_norm_rope": "projected:1",
    "store_prior_summary": "k_cache:2",
    "take_rows": "table:0 table:1 index:0",
    "window_attention": "page_table:0 page_table:1",
    "write_kv": "",
}
"""Dims of arguments of the engine's ops that no other argument determines."""
SIZED = [param for param in CHECKED if param.id in FREE]


@lru_cache(maxsize=8)
def cases_with(op: Op[..., Any]) -> dict[str, dict[str, Any]]:
    """Name of each tensor argument of an op -> the first case with it."""
    found: dict[str, dict[str, Any]] = {}
    for case in cases_of(op):
        named = case.clone().named(list(op.__signature__.parameters))
        tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
        if any(value.is_mkldnn or value.numel() == 0 for value in tensors.values()):
            continue
        found = dict.fromkeys(tensors, named) | found
    return found


def broken(op: Op[..., Any], change: Callable[[Tensor], Any]) -> Iterator[tuple[str, Arguments]]:
    """(call, name of the changed tensor): each tensor is changed in the first case with it."""
    for name, named in cases_with(op).items():
        yield name, Arguments((), {**named, name: change(named[name])})


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


@pytest.mark.parametrize("op", CHECKED)
def test_values_in_place_of_tensors_are_named(op: Op[..., Any]) -> None:
    for wrong, name in itertools.product((None, 0.5, "x", [torch.ones(2)]), cases_with(op)):
        optional = "None" in str(op.__signature__.parameters[name].annotation)
        if name not in SCRATCH and not (wrong is None and optional):
            said = f"argument `{name}` is {type(wrong).__name__} .*, not a tensor"
            with pytest.raises(BadArgument, match=said):
                op(**{**cases_with(op)[name], name: wrong})


@pytest.mark.parametrize("op", CHECKED)
def test_values_in_place_of_numbers_are_named(op: Op[..., Any]) -> None:
    case = next(case for case in cases_of(op) if all(_sizes(case)))
    given = case.named(list(op.__signature__.parameters))
    numbers = [name for name, value in given.items() if not isinstance(value, Tensor)]
    for name, wrong in itertools.product(numbers, ("x", {}, torch.zeros(2, 2))):
        try:
            op(**{**case.clone().named(list(given)), name: wrong})
        except BadArgument as error:
            said = str(error)
        else:
            # Ignored arguments are not checked, and flags accept any value with a truth value.
            continue
        assert f"`{name}`" in said


def longer(x: Tensor, dim: int) -> Tensor:
    """x with its first line along a dim once more at the end."""
    return torch.cat((x, x.narrow(dim, 0, 1)), dim)


def test_every_op_looks_at_its_arguments() -> None:
    """Either the op has a check, or its fronts check the arguments."""
    assert not [op.name for op in all_ops() if op._check is None and not op.fronts]


@pytest.mark.parametrize("op", SIZED)
def test_another_rank_is_refused(op: Op[..., Any]) -> None:
    for name, arguments in broken(op, lambda x: x.unsqueeze(0)):
        if f"{name}:rank" not in FREE[op.name].split():
            with pytest.raises(BadArgument, match=f"^{op.name}: argument `{name}` has shape"):
                op(*arguments.args, **arguments.kwargs)


@pytest.mark.parametrize("op", SIZED)
def test_a_size_that_fits_nothing_is_refused(op: Op[..., Any]) -> None:
    for dim, name in itertools.product(range(4), cases_with(op)):
        named = cases_with(op)[name]
        if named[name].dim() > dim and f"{name}:{dim}" not in FREE[op.name].split():
            with pytest.raises(BadArgument, match=f"^{op.name}: argument `[a-z_]+` "):
                op(**{**named, name: longer(named[name], dim)})


@pytest.mark.parametrize("op", SIZED)
def test_a_dtype_of_other_use_is_refused(op: Op[..., Any]) -> None:
    def other(x: Tensor) -> Tensor:
        return x.double() if x.is_floating_point() else x.to(torch.int16)

    for name, arguments in broken(op, other):
        with pytest.raises(BadArgument, match=f"^{op.name}: argument `{name}` is .*(64|16), not "):
            op(*arguments.args, **arguments.kwargs)


def f(*shape: int) -> Tensor:
    return torch.ones(shape)


def i(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def j(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def b(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=BYTES)


QKV = (2, 1, 1, 4, 1e-6, f(4), f(4), 1e4, True)
CACHES, HALVES = (f(5, 2, 4, 8),) * 2, (f(5, 2, 4, 8).half(),) * 2
WIDE = (f(5, 2, 4, 9),) * 2
BYTE_CACHES = (b(5, 2, 4, 18)[..., ::2], b(5, 2, 4, 9))
PAGED, WHERE = (f(3, 4, 8), *CACHES), (i(3), i(3), j(2, 9))
DECODE = (i(4), i(4), i(4), i(4).int(), i(3), j(2, 9))
SELECT = (f(3, 4, 8), f(5, 2, 8), None, f(3, 4), *WHERE)
LANDMARK = (f(3, 4, 8), f(3, 4, 8), *CACHES, f(5, 2, 8), None, *WHERE)
TIGHT = (f(3, 4, 8), f(3, 4, 8), f(5, 2, 1, 8), f(5, 2, 1, 8))
CHOSEN = (i(3), j(2, 9), j(3, 2, 1), f(3, 2, 1))
NORMED = (None, f(6, 8), None)
NONE = (None, None, None)
RAGGED = (f(3, 2, 16), f(3, 2, 16), j(2), j(2))
MASKED = (j(1, 2, 1), j(1, 2, 1, 1), j(1, 2, 1), j(1, 2, 1, 1))
LATENT = (f(1, 2, 12), f(1, 2, 4), f(3, 0, 16), i(1), j(1, 2), None, 1.0)
NO_PAGES = (i(3), i(3), j(0, 9))
SEQUENCE = (f(1, 8, 2, 4), f(1, 8, 1, 4), f(1, 8, 1, 4), *NONE)
THIRDS = (f(1, 8, 3, 4), f(1, 8, 2, 4), f(1, 8, 2, 4), *NONE)
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
    (ops.dense_attention, (*PAGED, i(6)[::2], i(3), j(2, 9)), {}, "`row` has strides [2]"),
    (ops.dense_attention, (*PAGED, i(3), i(3), j(9, 2).T), {}, "`page_table` has strides [1, 2]"),
    (ops.dense_attention, (*PAGED, *WHERE), {"segments": [0, 0]}, "`segments` is [0, 0]"),
    (ops.dense_attention, (*PAGED, *WHERE), {"segments": [0, 0, 2]}, "segments of 3 tokens"),
    (ops.dense_attention, (f(3, 4, 8), *BYTE_CACHES, *WHERE), {}, "`k_cache` has strides"),
    (ops.window_attention, (*PAGED, *WHERE, 0), {}, "`window` is 0, not 1 or more"),
    (ops.window_attention, (*PAGED, *WHERE, 4), {"dtype": torch.int8}, "`dtype` is int8, not fl"),
    (ops.window_attention, (f(3, 3, 8), *CACHES, *WHERE, 4), {}, "[3, 3, 8], not [any, n * 2, 8]"),
    (ops.window_attention, (f(3, 4, 8), f(5, 0, 4, 8), f(5, 0, 4, 8), *WHERE, 4), {}, "h_kv > 0"),
    (ops.write_kv, (f(3, 2, 8), f(3, 2, 8), *CACHES, i(6)[::2]), {}, "`location` has strides [2]"),
    (ops.write_kv, (f(3, 2, 8).half(), f(3, 2, 8), *CACHES, i(3)), {}, "`k` is float16, not float"),
    (ops.write_kv, (f(3, 2, 8), f(3, 2, 8), *BYTE_CACHES[::-1], i(3)), {}, "`v_cache` has strides"),
    (ops.decode_slots, (*DECODE, False, 1, 7, 0, 0), {}, "`page_size` is 1, not 2 or more"),
    (ops.decode_slots, (*DECODE, True, 4, 7, 0, 0), {}, "`tables` has 2 rows, not 4 or more"),
    (ops.decode_slots, (*DECODE[:4], i(1), DECODE[5], False, 4, 7, 0, 0), {}, "has 1 numbers, not"),
    (ops.ring_read, (i(3)[None], i(0).view(0, 1, 3), i(1)), {}, "`ring` has shape [0, 1, 3]"),
    (ops.ring_write, (i(3), i(4).view(2, 2), i(1)), {}, "`values` has 3 numbers for entries of 2"),
    (ops.ring_write, (i(3), i(8).view(2, 4), i(1), i(5)), {}, "`place` is None: `kept` and"),
    (ops.dense_attention, (*PAGED, *NO_PAGES), {}, "`page_table` has shape [0, 9]: pages for no t"),
    (
        ops.dense_attention,
        (f(3, 0, 8), *CACHES, *WHERE),
        {},
        "`q` has shape [3, 0, 8], not [any, n",
    ),
    (ops.dense_attention, (f(3, 4, 8), *(f(5, 2, 0, 8),) * 2, *WHERE), {}, "h_kv > 0 and S > 0"),
    (ops.cutlass_mla_decode, LATENT, {}, "_cache` has shape [3, 0, 16]: pages of no slots"),
    (ops.flash_attn_varlen_func, (f(3, 0, 16), *RAGGED), {}, "`q` has 0 heads, not a multiple"),
    (ops.sparse_attn_func, (f(1, 5, 0, 8), *(f(1, 5, 2, 8),) * 2, *MASKED), {}, "`q` has 0 heads"),
    (ops.select_pages, (*SELECT, 4, 0, 1), {}, "`window` is 0, not 1 or more"),
    (ops.select_pages, (*SELECT, 4, 3, 0), {}, "`topk` is 0, not 1 or more"),
    (ops.select_pages, (*SELECT, 0, 3, 1), {}, "`page_size` is 0, not 1 or more"),
    (ops.select_pages, (*SELECT, 4, 3, 1), {"strategy": "heads"}, "`strategy` is 'heads'. It is"),
    (ops.select_pages, (*SELECT, 4, 3, 1), {"num_kv_heads": 3}, "`lmk_q` has 4 heads, not a"),
    (ops.select_pages, (*SELECT, 4, 3, 1), {"num_kv_heads": 0}, "`lmk_q` has 4 heads, not a"),
    (ops.landmark_attention, (*LANDMARK, 3, -1, True), {}, "`topk` is -1, not 1 or more"),
    (ops.landmark_attention, (*LANDMARK, 0, 1, True), {"strategy": "head"}, "`window` is 0"),
    (ops.landmark_attention, (*LANDMARK, 3, 1, True), {"store_summaries": True}, "`summary_key` h"),
    (ops.landmark_attention, (*TIGHT, f(5, 2, 8), None, *WHERE, 3, 1, True), {}, "without a key"),
    (ops.page_attention, (f(3, 2, 8), *TIGHT[2:], *CHOSEN), {}, "`k_cache` has shape [5, 2, 1, 8]"),
    (ops.prior_summary, (f(3, 4, 8), TIGHT[2], i(3)), {}, "pages without a key"),
    (ops.blend_window, (f(3, 4, 8), f(3, 4, 8), f(3, 4), torch.int32), {}, "`dtype` is int32, not"),
    (ops.prior_summary, (f(3, 4, 8), CACHES[0], i(6)[::2]), {}, "`pages` has strides [2]"),
    (ops.linear, (f(3, 4), f(5, 4)), {"dtype": torch.int8}, "`dtype` is int8, not float"),
    (ops.linear, (f(), f(5, 4)), {}, "`input` has shape [], not [..., K]"),
    (ops.linear, (f(3, 4), f(5, 4), f(10)[::2]), {}, "`bias` has strides [2]"),
    (ops.linear, (f(3, 4).half(), f(5, 4)), {}, "`weight` is float32, not float16"),
    (ops.gated_linear, (f(3, 4), f(5, 4)), {}, "`weight` has 5 rows"),
    (ops.head_norm_rope, (f(3, 2, 5), f(2, 5), f(3, 5)), {}, "`cos_sin` has 5 columns"),
    (ops.split_norm_rope, (f(3, 99), None, f(5, 8), None, 4, 2), {}, "`weight` has 5 heads"),
    (ops.split_norm_rope, (f(3, 99), f(3, 32), f(6, 8), None, 4, 2), {}, "`weight` has 6 heads"),
    (ops.split_norm_rope, (f(3, 47), None, f(6, 8), None, 4, 2), {}, "`projected` has 47 columns"),
    (ops.split_norm_rope, (f(3, 99), None, f(6, 5), None, 4, 2), {}, "of an odd number of numbers"),
    (ops.heads_into_cache, (f(3, 63), *NORMED, *CACHES, i(3), 4), {}, "`projected` has 63 columns"),
    (ops.heads_into_cache, (f(3, 64), *NORMED, *HALVES, i(3), 4), {}, "`k_cache` is torch.float16"),
    (ops.heads_into_cache, (f(3, 64), *NORMED, *WIDE, i(3), 4), {}, "`k_cache` has shape [5, 2, "),
    (ops.argmax_tokens, (f(3, 0),), {}, "`logits` has shape [3, 0]"),
    (ops.score_tokens, (f(3, 0), i(3)), {}, "`logits` has shape [3, 0]"),
    (ops.score_tokens, (f(3, 4), i(2)), {}, "`tokens` has shape [2]"),
    (sequence_attention, (*SEQUENCE, 5, 4), {}, "`page_size` is 5, which 8 slots are no"),
    (sequence_attention, (*SEQUENCE, 1, 4), {}, "`page_size` is 1, not 2 or more"),
    (sequence_attention, (*SEQUENCE, 4, 4, -1), {}, "`topk` is -1, not 0 or more"),
    (sequence_attention, (*SEQUENCE, 4, 4, 1), {"aligned": False}, "`topk` is 1. It needs an"),
    (sequence_attention, (*THIRDS, 4, 4), {}, "`q` has 3 heads, not a multiple of the 2 of k"),
    (sequence_attention, (*SEQUENCE, 4, 4, 1), {}, "`lmk_q` is None and contradicts topk"),
    (sequence_attention, (*SEQUENCE, 4, 1), {"aligned": False}, "`window` is 1, not 2 or more"),
]


@pytest.mark.parametrize("call, args, kwargs, said", SHAPES)
def test_wrong_arguments_are_named(
    call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], said: str
) -> None:
    before = [arg.clone() for arg in args if isinstance(arg, Tensor)]
    with pytest.raises(BadArgument) as refused:
        call(*args, **kwargs)
    assert said in str(refused.value)
    after = [arg for arg in args if isinstance(arg, Tensor)]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


LINES = (f(1, 5, 2, 8),) * 3
CACHED = (f(2, 1, 2, 8), f(2, 4, 2, 8), f(2, 4, 2, 8))
TURNED = {"rotary_sin": f(9, 4), "cache_seqlens": j(2)}
OTHERS: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], str]] = [
    (ops.apply_token_bitmask_inplace_cuda, (None, j(3, 2)), {}, "`logits` is NoneType None, not a"),
    (
        ops.apply_token_bitmask_inplace_cuda,
        (f(3, 9), j(3, 1), "x"),
        {},
        "`indices` is 'x', neither",
    ),
    (
        ops.flash_attn_varlen_func,
        (f(3, 2, 16), *RAGGED[:2], 3, 3),
        {},
        "`cu_seqlens_q` is int 3, n",
    ),
    (
        ops.flash_attn_varlen_func,
        (f(3, 2, 16), 1.0, *RAGGED[1:]),
        {},
        "`k` is float 1.0, not a ten",
    ),
    (
        ops.flash_attn_with_kvcache,
        CACHED,
        {"cache_seqlens": [1]},
        "`cache_seqlens` is [1], neither",
    ),
    (
        ops.flash_attn_with_kvcache,
        CACHED,
        {"rotary_cos": i(9, 4), **TURNED},
        "`rotary_cos` is int64",
    ),
    (ops.sparse_attn_varlen_func, (*LINES, *MASKED, *NONE[:2], 5, 5), {}, "`cu_seqlens_q` is None"),
    (ops.top_k_renorm_probs, (f(3, 4), None), {}, "`top_k` is NoneType None, neither a number nor"),
    (ops.top_p_sampling_from_probs, (f(3, 4), "x"), {}, "`top_p` is str 'x', neither a number nor"),
    (ops.copy_to_gpu_no_ce, ([1], j(1)), {}, "`input` is list [1], not a tensor"),
    (
        ops.transfer_kv_direct,
        (f(8, 4), f(8, 4), i(1), i(1), 1),
        {},
        "`src_layers` is a Tensor, not",
    ),
    (
        ops.transfer_kv_direct,
        ([f(8, 4)], [0], i(1), i(1), 1),
        {},
        "`dst_layers` is int 0, not a te",
    ),
    (ops.transfer_kv_direct, ([f()], [f()], i(1), i(1), 1), {}, "`src_layers` holds a number, not"),
    (
        ops.transfer_kv_per_layer_mla,
        (8, f(8, 4), i(1), i(1), 16),
        {},
        "`src` is int 8, not a tensor",
    ),
]
"""Fronts, which check arguments that their ops do not receive."""


@pytest.mark.parametrize("call, args, kwargs, said", OTHERS)
def test_arguments_of_another_type_are_named(
    call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], said: str
) -> None:
    with pytest.raises(BadArgument, match="argument `") as refused:
        call(*args, **kwargs)
    assert said in str(refused.value)


def test_an_error_that_is_no_argument_s_stays_what_it_is() -> None:
    def stumbles(x: Tensor, n: int | None = None) -> None:
        raise AttributeError(f"nothing of {n}")

    def definition(x: Tensor, n: int | None = None) -> None: ...

    look = naming(stumbles, definition)
    with pytest.raises(AttributeError, match="nothing of 3"):
        look(torch.ones(1), 3)
    with pytest.raises(BadArgument, match="definition: argument `n` is str 'x', not an integer or"):
        look(torch.ones(1), n="x")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_an_error_of_the_device_is_no_argument_s(error: type[Exception]) -> None:
    def fails(x: Tensor, n: int) -> None:
        raise error("no memory")

    with pytest.raises(error, match="no memory"):
        naming(fails)(torch.ones(1), "x")


def test_numbers_of_other_libraries_are_numbers() -> None:
    def fails(x: Tensor, n: int, scale: float, causal: bool) -> None:
        raise RuntimeError("something else")

    look, numpy = naming(fails), pytest.importorskip("numpy")
    with pytest.raises(RuntimeError, match="something else"):
        look(torch.ones(1), numpy.int64(3), numpy.float32(0.5), 1)


def test_a_number_in_place_of_a_tensor_is_named() -> None:
    x = torch.randn(3, 8)
    with pytest.raises(BadArgument, match="argument `weight` is float 0.5, not a tensor"):
        ops.rmsnorm(x, 0.5)
    with pytest.raises(BadArgument, match="argument `out` is float 1e-06, not a tensor"):
        ops.rmsnorm(x, x[0], out=1e-6)


def test_a_missing_argument_is_told_by_the_op() -> None:
    with pytest.raises(TypeError, match=r"cutlass_mla_decode\(\) missing 1 .* 'sm_scale'"):
        ops.cutlass_mla_decode(*[torch.randn(1)] * 6)


def test_a_dtype_is_named_once() -> None:
    with pytest.raises(BadArgument, match="`weight` is int64, not float32$"):
        ops.rmsnorm(torch.ones(2, 4), torch.ones(4).long())
