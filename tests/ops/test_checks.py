"""Shared checks of tensor arguments: shape, dtype, device and contiguity."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cairn.errors import BadArgument
from cairn.ops.checks import expect


@pytest.mark.parametrize(
    "options, problem",
    [
        ({"shape": (4, None)}, "has shape [2, 3], not [4, any]"),
        ({"shape": (2,)}, "has shape [2, 3], not [2]"),
        ({"dtypes": (torch.int32, torch.int64)}, "is float32, not int32 or int64"),
        ({"like": torch.ones(1, device="meta")}, "lies on cpu, other arguments on meta"),
    ],
)
def test_messages_say_what_was_expected(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(BadArgument) as error:
        expect("toy", "x", torch.ones(2, 3), **options)
    assert str(error.value) == f"toy: argument `x` {problem}"


def test_density_is_asked_of_the_last_dims() -> None:
    x = torch.ones(4, 6, 8)[:, :3]
    expect("toy", "x", x, (4, 3, None), (torch.float32,), x, dense=2)
    expect("toy", "x", x[:0], dense=-1)
    expect("toy", "x", x[..., :1], dense=1)
    for wrong, dense in ((x, -1), (x[..., ::2], 1), (x.transpose(1, 2), 1), (x[..., :7], 2)):
        with pytest.raises(BadArgument, match="must be contiguous"):
            expect("toy", "x", wrong, dense=dense)
