"""What the machine allows: measured memory bandwidth and GEMM rate, and the work of a step.

The work follows the cost model of hierarchical sparse attention: weights are streamed once a step,
every query reads its window, its selected pages and the summaries of all candidate pages.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from cairn.models.spec import ELEMENT_SIZE, LayerSpec, ModelSpec

BANDWIDTH_BYTES = {"cpu": 256 << 20, "cuda": 4 << 30}
"""A sum over so much reads memory, not caches, and outlasts its launch."""
GEMM_SIZE = {"cpu": 2048, "cuda": 8192}
REPEATS = 5
BIAS_BYTES = 4


@dataclass(frozen=True, slots=True)
class Roofline:
    """Rates of this machine.

    Attributes:
        bandwidth: bytes read from memory per second.
        gemm: floating-point operations per second of a large matrix product.
        dtype: dtype of that product.
        device: where both were measured.
    """

    bandwidth: float
    gemm: float
    dtype: str
    device: str

    def decode_floor(
        self, spec: ModelSpec, slots: int, batch: int, quantized: bool = False
    ) -> float:
        """Seconds a decode step cannot beat: its bytes at the measured bandwidth."""
        return decode_bytes(spec, slots, batch, self.dtype, quantized) / self.bandwidth

    def prefill_floor(self, spec: ModelSpec, slots: int, batch: int = 1) -> float:
        """Seconds a prefill cannot beat: its operations at the measured GEMM rate."""
        return batch * prefill_flops(spec, slots) / self.gemm


def measure(dtype: str, device: str = "cpu") -> Roofline:
    """Measure both rates now, on otherwise idle cores.

    Args:
        dtype: "float32", "bfloat16" or "float16", of the matrix product.
        device: a torch device.
    """
    return Roofline(measure_bandwidth(device), measure_gemm(dtype, device), dtype, device)


def measure_bandwidth(device: str = "cpu", size: int | None = None) -> float:
    """Bytes per second of a sum over `size` bytes of float32, best of five."""
    size = size or _bandwidth_bytes(device)
    data = torch.ones(size // 4, dtype=torch.float32, device=device)
    return size / _best(data.sum, device)


def measure_copy(device: str = "cpu", size: int | None = None) -> float:
    """Bytes per second, read and written, of a copy of so many bytes, best of five."""
    size = size or _bandwidth_bytes(device) // 2
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * size / _best(lambda: target.copy_(source), device)


def _bandwidth_bytes(device: str) -> int:
    """BANDWIDTH_BYTES, or half of what an engine beside has left of a GPU."""
    wanted = BANDWIDTH_BYTES[torch.device(device).type]
    if not device.startswith("cuda"):
        return wanted
    torch.cuda.empty_cache()
    return min(wanted, torch.cuda.mem_get_info(device)[0] // 2)


def measure_gemm(dtype: str, device: str = "cpu", size: int | None = None) -> float:
    """Operations per second of a square matrix product of this side, best of five."""
    size = size or GEMM_SIZE[torch.device(device).type]
    kind = getattr(torch, dtype)
    left = torch.randn(size, size, device=device).to(kind)
    right = torch.randn(size, size, device=device).to(kind)
    return 2.0 * size**3 / _best(lambda: left @ right.T, device)


def _best(work: Callable[[], torch.Tensor], device: str) -> float:
    """Seconds of the fastest of five runs, after one to warm up."""
    seconds = []
    with torch.inference_mode():
        for _ in range(REPEATS + 1):
            began = time.perf_counter()
            work()
            if device.startswith("cuda"):
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


def decode_bytes(
    spec: ModelSpec, slots: int, batch: int, dtype: str, quantized: bool = False
) -> float:
    """Bytes that one decode step must read and write.

    Args:
        spec: the model.
        slots: slots of each sequence before the step.
        batch: sequences, one query each.
        dtype: of weights and cache.
        quantized: keys and values have a byte a number, and one more a slot and head.
    """
    size = ELEMENT_SIZE[dtype]
    head = spec.head_dim + 1 if quantized else spec.head_dim * size
    pair = 2 * spec.num_kv_heads * head
    weights = sum(_layer_parameters(spec, layer) for layer in spec.layers) * size
    weights += spec.vocab_size * spec.hidden_size * size
    rows = batch * spec.hidden_size * size
    read = sum(_query_bytes(spec, layer, slots, size, pair) for layer in spec.layers)
    return weights + rows + batch * read


def prefill_flops(spec: ModelSpec, slots: int) -> float:
    """Operations to prefill one sequence of `slots` slots and sample one token."""
    head = 2.0 * spec.vocab_size * spec.hidden_size
    return head + sum(_layer_flops(spec, layer, slots) for layer in spec.layers)


def pages_per_query(spec: ModelSpec, slots: int) -> int:
    """Pages that a query at slot `slots` reads at most in a landmark layer: window and top-k."""
    if spec.hils is None or not spec.page_size:
        return 0
    size = spec.page_size
    candidates = max(0, (slots - spec.hils.window + 1) // size)
    return min(candidates, spec.hils.topk) + slots // size + 1 - candidates


def _layer_parameters(spec: ModelSpec, layer: LayerSpec) -> int:
    """Matrix parameters of a layer: what a step multiplies with."""
    hidden, query = spec.hidden_size, spec.num_heads * spec.head_dim
    count = 2 * hidden * (query + spec.num_kv_heads * spec.head_dim)
    count += 3 * hidden * spec.intermediate_size
    if layer.kind == "hils" and spec.hils is not None:
        if spec.hils.lmk_q == "full":
            count += hidden * query
        elif spec.hils.lmk_q == "lora":
            count += spec.hils.lora_rank * (hidden + query)
    return count


def _query_bytes(spec: ModelSpec, layer: LayerSpec, slots: int, size: int, pair: int) -> float:
    """Cache bytes that one query at slot `slots` moves in one layer.

    Args:
        size: bytes of a number of a summary.
        pair: bytes of a slot's key and value.
    """
    if layer.kind != "hils" or spec.hils is None or not spec.page_size:
        seen = slots + 1 if layer.window is None else min(slots + 1, layer.window)
        return pair * (seen + 1)
    hils, page = spec.hils, spec.page_size
    candidates = max(0, (slots - hils.window + 1) // page)
    window = slots + 1 - candidates * page
    summary = spec.summary_heads * spec.head_dim * size
    summary += BIAS_BYTES * spec.num_heads if hils.bias else 0
    selected = min(candidates, hils.topk) * page
    pooled = (page * pair / 2 + summary) / page if hils.needs_summary_query else 0.0
    return pair * (window + selected + 1) + candidates * summary + pooled


def _layer_flops(spec: ModelSpec, layer: LayerSpec, slots: int) -> float:
    """Operations of one layer over a whole sequence."""
    query = spec.num_heads * spec.head_dim
    total = 2.0 * _layer_parameters(spec, layer) * slots
    if layer.kind != "hils" or spec.hils is None or not spec.page_size:
        return total + 4.0 * query * _visible(slots, layer.window)
    hils, page = spec.hils, spec.page_size
    candidates = _sum_of_pages(slots - hils.window + 1, page)
    few = min(slots - hils.window + 1, hils.topk * page)
    selected = _sum_of_pages(few, page) + hils.topk * max(0, slots - hils.window + 1 - few)
    span = _visible(slots, None) - candidates * page
    total += 4.0 * query * (span + (page - 1) * selected) + 2.0 * query * candidates
    if hils.needs_summary_query:
        total += 4.0 * query * (page - 1) / page * slots
    return total


def _sum_of_pages(count: int, page: int) -> int:
    """Sum of x // page for x in 0 .. count - 1."""
    if count <= 0:
        return 0
    whole, rest = divmod(count, page)
    return page * whole * (whole - 1) // 2 + rest * whole


def _visible(slots: int, window: int | None) -> float:
    """Sum over the queries of a sequence of the keys each sees: all before it, or a window."""
    if window is None or slots <= window:
        return slots * (slots + 1) / 2
    return window * (window + 1) / 2 + (slots - window) * window
