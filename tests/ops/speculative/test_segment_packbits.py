"""segment_packbits against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cairn.errors import BadArgument
from cairn.ops import segment_packbits
from tests.ops.sampling.variants import runnable_on

VARIANTS = runnable_on(segment_packbits, "cpu")


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("lengths", [[1, 7, 8, 9], [0, 100, 0, 63], [1000], []])
def test_bits_of_numpy(lengths: list[int], index: torch.dtype, name: str) -> None:
    g = torch.Generator().manual_seed(sum(lengths))
    flags = torch.rand(sum(lengths), generator=g) < 0.5
    begin = [0, *np.cumsum(lengths).tolist()]
    out = [3 * b + -(-start // 8) + b for b, start in enumerate(begin)]
    y = torch.full((out[-1] + 9,), 77, dtype=torch.uint8)
    expected = y.numpy().copy()
    for b, length in enumerate(lengths):
        bits = np.packbits(flags.numpy()[begin[b] : begin[b] + length], bitorder="little")
        expected[out[b] : out[b] + len(bits)] = bits
    indptr = (torch.tensor(x, dtype=index) for x in (begin, out))
    segment_packbits.using(name)(flags, *indptr, y, len(lengths))
    assert y.tolist() == expected.tolist()


@pytest.mark.parametrize("name", VARIANTS)
def test_of_bytes_any_but_0_is_true(name: str) -> None:
    flags = torch.tensor([0, 1, 2, 255, 128, 0, 0, 3] * 3 + [0, 4], dtype=torch.uint8)
    y = [torch.zeros(4, dtype=torch.uint8) for _ in range(2)]
    for given, out in zip((flags, flags != 0), y, strict=True):
        segment_packbits.using(name)(given, torch.tensor([0, 26]), torch.tensor([0, 4]), out, 1)
    assert y[0].tolist() == y[1].tolist() == [0b10011110] * 3 + [0b10]
    segment_packbits(flags, torch.tensor([0, 26]), torch.tensor([0, 4]), y[0].zero_(), 1)
    assert torch.equal(y[0], y[1])


@pytest.mark.parametrize(
    "position, wrong, named",
    [
        (0, torch.zeros(9, dtype=torch.int8), "x"),
        (0, torch.zeros(18, dtype=torch.bool)[::2], "x"),
        (1, torch.tensor([0, 9.0]), "input_indptr"),
        (2, torch.tensor([0]), "output_indptr"),
        (3, torch.zeros(2, dtype=torch.int8), "y"),
        (4, -1, "batch_size"),
    ],
)
def test_wrong_arguments_are_named(position: int, wrong: object, named: str) -> None:
    given: list[object] = [
        *(torch.ones(9, dtype=torch.bool), torch.tensor([0, 9]), torch.tensor([0, 2])),
        *(torch.zeros(2, dtype=torch.uint8), 1),
    ]
    segment_packbits(*given)
    given[position] = wrong
    with pytest.raises(BadArgument, match=f"`{named}`"):
        segment_packbits(*given)


@pytest.mark.parametrize(
    "begins, outs, wrong",
    [
        ([0, 9, 21], [0, 2, 4], "`input_indptr` holds 21, not numbers from 0 to 20"),
        ([-1, 9, 20], [0, 2, 4], "`input_indptr` holds -1"),
        ([0, 9, 20], [0, 5, 9], "`output_indptr` holds 5, not numbers from 0 to 4"),
        ([0, 9, 20], [0, 3, 4], "`y` has 4 elements, the segments' bytes end at 5"),
    ],
)
def test_segments_that_lie_elsewhere_are_refused_on_the_cpu(
    begins: list[int], outs: list[int], wrong: str
) -> None:
    y = torch.full((4,), 170, dtype=torch.uint8)
    with pytest.raises(BadArgument, match=wrong):
        segment_packbits(torch.ones(20, dtype=torch.bool), *map(torch.tensor, (begins, outs)), y, 2)
    assert (y == 170).all()
