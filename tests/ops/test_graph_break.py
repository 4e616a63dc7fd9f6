"""Functions on raw addresses break the graph of torch.compile, and do not import it."""

from __future__ import annotations

import subprocess
import sys

import torch
from torch import Tensor

from cairn import ops


def table(layers: list[Tensor]) -> Tensor:
    return torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.uint64)


def test_a_compiled_function_copies_by_addresses() -> None:
    source = [torch.randn(8, 16) for _ in range(3)]
    target = [torch.zeros(8, 16) for _ in range(3)]
    slots = torch.tensor([1, 2, 5])

    def around(x: Tensor) -> Tensor:
        more = x + 1
        ops.transfer_kv_all_layer_mla(table(source), table(target), slots, slots, 64, 3)
        return more * 2

    assert torch.compile(around, backend="eager")(torch.ones(3)).tolist() == [4, 4, 4]
    for one, other in zip(source, target, strict=True):
        torch.testing.assert_close(other[slots], one[slots], rtol=0, atol=0)
        assert int(other.count_nonzero()) == other[slots].numel()


def test_a_compiled_function_looks_at_memory() -> None:
    memory = torch.arange(6.0)

    def around(x: Tensor) -> Tensor:
        return ops.weak_ref_tensor(memory) * (x + 1)

    compiled = torch.compile(around, backend="eager")
    for _ in range(2):
        assert compiled(torch.ones(6)).tolist() == (2 * memory).tolist()
        memory += 1


def test_torch_compile_is_not_imported_with_the_ops() -> None:
    code = "import cairn.llm, sys; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
