"""sequence_attention: results compared with the engine's op, gradients with autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cairn import ops
from cairn.errors import BadArgument
from cairn.ops import gpu
from cairn.ops.registry import force
from cairn.ops.testing import Make
from cairn.train.sequence import sequence_attention

SIZE = 16
NAMES = ("q", "k", "v", "lmk_q", "summary_key", "summary_bias")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def arguments(
    groups: int, group: int, length: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> list[Tensor]:
    make, heads, pages = Make(device, seed=length), groups * group, length // SIZE
    q = make.randn(2, length, heads, 16, dtype=dtype, scale=2.0)
    k, v = (make.randn(2, length, groups, 16, dtype=dtype) for _ in range(2))
    # Multiples of 1/4, so that rounding does not change the order of scores.
    z = make.randint(-8, 9, 2, length, heads, 16).to(dtype) / 4
    key = make.randint(-8, 9, 2, pages, heads, 16).to(dtype) / 4
    return [q, k, v, z, key, make.randint(0, 9, 2, pages, heads).float() / 4]


def paged(x: Tensor) -> Tensor:
    """[B, L, h, d] as a cache [pages, h, S, d]."""
    return x.unflatten(1, (-1, SIZE)).flatten(0, 1).transpose(1, 2).contiguous()


@pytest.mark.parametrize("softmax1", [False, True])
@pytest.mark.parametrize(("window", "topk"), [(1, 1), (20, 2), (33, 6)])
def test_it_is_what_the_engine_serves(window: int, topk: int, softmax1: bool) -> None:
    q, k, v, z, key, bias = arguments(2, 2, 96)
    o, page_mass = sequence_attention(q, k, v, z, key, bias, SIZE, window, topk, softmax1)
    row, slot = torch.arange(2).repeat_interleave(96), torch.arange(96).repeat(2)
    table = torch.arange(12, dtype=torch.int32).view(2, 6)
    served, _, scores, lse = ops.landmark_attention(
        *(q.flatten(0, 1), z.flatten(0, 1), paged(k), paged(v)),
        *(key.flatten(0, 1), bias.flatten(0, 1), row, slot, table, window, topk, softmax1),
    )
    torch.testing.assert_close(o.flatten(0, 1), served, rtol=2e-5, atol=2e-5)
    weights, _ = ops.page_weights(scores, lse, softmax1)
    torch.testing.assert_close(page_mass.flatten(0, 1), weights.sum(-1), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("mask", [False, True])
def test_a_plain_window_is_what_the_engine_serves(mask: bool) -> None:
    q, k, v = arguments(2, 2, 96)[:3]
    o, page_mass = sequence_attention(
        *(q, k, v, None, None, None, SIZE, 21), aligned=False, mask_landmarks=mask
    )
    row, slot = torch.arange(2).repeat_interleave(96), torch.arange(96).repeat(2)
    table = torch.arange(12, dtype=torch.int32).view(2, 6)
    served, _ = ops.window_attention(
        *(q.flatten(0, 1), paged(k), paged(v), row, slot, table, 21),
        aligned=False,
        mask_landmarks=mask,
    )
    torch.testing.assert_close(o.flatten(0, 1), served, rtol=2e-5, atol=2e-5)
    assert not page_mass.any()


def gradients(given: list[Tensor], name: str, **options: Any) -> dict[str, Tensor]:
    """Results and gradients of one implementation, for a loss that weights all results."""
    own = [x.clone().requires_grad_() for x in given]
    own += [None] * (len(NAMES) - len(own))
    o, page_mass = sequence_attention.using(name)(*own, SIZE, **options)
    make = Make(str(o.device), seed=7)
    loss = (o.float() * make.randn(*o.shape)).sum()
    if page_mass.requires_grad:
        loss = loss + (page_mass * make.randn(*page_mass.shape)).sum()
    loss.backward()
    grads = {n: x.grad for n, x in zip(NAMES, own, strict=True) if x is not None}
    return {"o": o.detach(), "page_mass": page_mass.detach()} | grads


def far(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference, relative to the expected norm."""
    a, b = actual.double(), expected.double()
    return float((a - b).norm() / b.norm().clamp(min=1e-3))


def compare(given: list[Tensor], dtype: torch.dtype, **options: Any) -> None:
    wanted = gradients(given, "reference", **options)
    found = gradients(given, "triton", **options)
    errors = {name: far(found[name], wanted[name]) for name in wanted}
    assert max(errors.values()) < TOLERANCE[dtype], errors


SHAPES = [(1, 1, 64), (2, 3, 48), (1, 8, 32)]
OPTIONS = [
    {"window": 20, "topk": 2, "softmax1": True},
    {"window": 1, "topk": 5, "softmax1": False},
    {"window": 19, "aligned": False, "mask_landmarks": False},
    {"window": 500, "aligned": False, "mask_landmarks": True},
    {"window": 20, "softmax1": True},
]


@pytest.mark.skipif(not gpu.INTERPRETED, reason="needs Triton, and a machine without CUDA")
@pytest.mark.parametrize(
    ("shape", "options"),
    [*zip(SHAPES, OPTIONS, strict=False), *((SHAPES[0], one) for one in OPTIONS[3:])],
)
def test_gradients_when_interpreted(shape: tuple[int, int, int], options: dict[str, Any]) -> None:
    given = arguments(*shape)[: 6 if "topk" in options else 3]
    compare(given, torch.float32, **options)


@pytest.mark.skipif(not gpu.INTERPRETED, reason="needs Triton, and a machine without CUDA")
@pytest.mark.parametrize("window", [(1 << 31) - 1, 1 << 40])
def test_a_window_may_be_wider_than_32_bits_tell(window: int) -> None:
    compare(arguments(1, 1, 32)[:3], torch.float32, window=window)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", [*SHAPES, (2, 4, 1024)])
def test_gradients(
    shape: tuple[int, int, int], options: dict[str, Any], dtype: torch.dtype
) -> None:
    given = arguments(*shape, dtype, "cuda")[: 6 if "topk" in options else 3]
    compare(given, dtype, **options)


def test_the_definition_is_differentiated_right() -> None:
    """Finite differences: the definition's masks must not stop a gradient."""
    # Between the multiples of 1/4, so that a small step changes no selection.
    own = [(x[:1].double() + 0.01 * i).requires_grad_() for i, x in enumerate(arguments(1, 2, 48))]

    def call(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return sequence_attention.reference(*tensors, SIZE, 5, 1, True)

    assert torch.autograd.gradcheck(call, own, eps=1e-5, atol=1e-5, fast_mode=True)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"page_size": 15, "window": 8, "topk": 1}, "`page_size` is 15"),
        ({"page_size": 16, "window": 0, "topk": 1}, "`window` is 0"),
        ({"page_size": 16, "window": 8}, "contradict"),
        ({"page_size": 16, "window": 8, "topk": 1, "aligned": False}, "aligned"),
    ],
)
def test_contradictions_are_refused(options: dict[str, Any], told: str) -> None:
    given = arguments(1, 1, 48)
    with pytest.raises(BadArgument, match=told):
        sequence_attention(*given, **options)


def test_the_definition_can_be_forced() -> None:
    given = arguments(1, 1, 48)
    with force("reference"):
        assert sequence_attention.choice(*given, SIZE, 8, 1) == "reference"
