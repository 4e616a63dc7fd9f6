"""Benchmark sizes: a gated delta net layer of Qwen3.5-35B-A3B, and a tiny one."""

from __future__ import annotations

from dataclasses import dataclass

from cairn.ops.bench_points import Draw


@dataclass(frozen=True)
class Net:
    """Key and value heads, their widths, the convolution's kernel size, and the steps to time."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int
    batches: tuple[int, ...]
    prefills: tuple[int, ...]

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


NETS = {
    "full": Net(16, 32, 128, 128, 4, batches=(1, 16, 64), prefills=(1024, 8192)),
    "tiny": Net(2, 4, 16, 16, 4, batches=(1, 3), prefills=(40,)),
}


def net_of(draw: Draw) -> Net:
    """The layer of the drawn size: "full" or "tiny"."""
    return NETS[draw.sizes]
