"""The roofline: measured memory bandwidth and GEMM rate, bytes and operations of a step.

Weights are read once per step. Each query reads its window, its selected pages and the summaries of
all candidate pages (hierarchical sparse attention), or what its kind of attention reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from cairn.bench import compressed_roofline
from cairn.specs.backends import DENSE
from cairn.specs.compressed import CompressedSpec
from cairn.specs.ffn import DenseFfn, FfnSpec
from cairn.specs.gated_delta import GatedDeltaSpec
from cairn.specs.gqa import GqaSpec
from cairn.specs.hils import HilsSpec
from cairn.specs.kv_format import KV_FORMATS
from cairn.specs.mla import MlaSpec
from cairn.specs.model import ELEMENT_SIZE, LayerSpec, MixerSpec, ModelSpec

BANDWIDTH_BYTES = {"cpu": 256 << 20, "cuda": 4 << 30}
"""Bytes of the bandwidth test: more than caches hold, and long compared to a kernel launch."""
GEMM_SIZE = {"cpu": 2048, "cuda": 8192}
REPEATS = 5
BIAS_BYTES = SCALE_BYTES = 4
FP8_BYTES = 1
"""Bytes per quantised element of a matrix; its scales are negligible."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """Measured rates of a device.

    Attributes:
        bandwidth: bytes read from memory per second.
        gemm: floating-point operations per second of a large matrix product.
        dtype: dtype of that product.
        device: the device.
    """

    bandwidth: float
    gemm: float
    dtype: str
    device: str

    def decode_floor(
        self, spec: ModelSpec, slots: int, batch: int, small: str | None = None
    ) -> float:
        """Least seconds of a decode step: its bytes at the measured bandwidth."""
        return decode_bytes(spec, slots, batch, self.dtype, small) / self.bandwidth

    def prefill_floor(self, spec: ModelSpec, slots: int, batch: int = 1) -> float:
        """Least seconds of a prefill: its operations at the measured GEMM rate."""
        return batch * prefill_flops(spec, slots) / self.gemm


def measure(dtype: str, device: str = "cpu") -> Roofline:
    """Measure both rates; other work on the device would falsify them.

    Args:
        dtype: "float32", "bfloat16" or "float16", of the matrix product.
        device: a torch device.
    """
    return Roofline(measure_bandwidth(device), measure_gemm(dtype, device), dtype, device)


def measure_bandwidth(device: str = "cpu", size: int | None = None) -> float:
    """Bytes per second of a float32 sum over `size` bytes, best of five."""
    size = size or _bandwidth_bytes(device)
    data = torch.ones(size // 4, dtype=torch.float32, device=device)
    return size / _best(data.sum, device)


def measure_copy(device: str = "cpu", size: int | None = None) -> float:
    """Bytes per second, read and written, of a copy of `size` bytes, best of five."""
    size = size or _bandwidth_bytes(device) // 2
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * size / _best(lambda: target.copy_(source), device)


def _bandwidth_bytes(device: str) -> int:
    """BANDWIDTH_BYTES, but at most half of the free memory of a GPU."""
    wanted = BANDWIDTH_BYTES[torch.device(device).type]
    if not device.startswith("cuda"):
        return wanted
    torch.cuda.empty_cache()
    return min(wanted, torch.cuda.mem_get_info(device)[0] // 2)


def measure_gemm(dtype: str, device: str = "cpu", size: int | None = None) -> float:
    """Operations per second of a product of two size x size matrices, best of five."""
    size = size or GEMM_SIZE[torch.device(device).type]
    kind = getattr(torch, dtype)
    left = torch.randn(size, size, device=device).to(kind)
    right = torch.randn(size, size, device=device).to(kind)
    return 2.0 * size**3 / _best(lambda: left @ right.T, device)


def _best(work: Callable[[], torch.Tensor], device: str) -> float:
    """Seconds of the fastest of five runs, after a warm-up."""
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
    spec: ModelSpec, slots: int, batch: int, dtype: str, small: str | None = None
) -> float:
    """Bytes that one decode step reads and writes.

    Args:
        spec: the model.
        slots: slots of each sequence before the step.
        batch: number of sequences, one query each.
        dtype: of weights that are not quantised, and of the cache.
        small: dtype of a cache of one of SMALL_KV_DTYPES: for keys and values one of KV_FORMATS;
            latents and index keys then have one byte per element, and scales (fp8_ds).
    """
    size = ELEMENT_SIZE[dtype]
    stored = size if spec.quantization is None else FP8_BYTES
    weights = sum(_read_parameters(spec, layer, batch) for layer in spec.layers) * stored
    weights += spec.vocab_size * spec.hidden_size * size
    rows = batch * spec.hidden_size * size
    read = sum(_query_bytes(spec, mixer, slots, size, small) for mixer in spec.mixers)
    return weights + rows + batch * read


def prefill_flops(spec: ModelSpec, slots: int) -> float:
    """Operations of a prefill of `slots` slots and the logits of one token."""
    head = 2.0 * spec.vocab_size * spec.hidden_size
    mixing = sum(_mixing_flops(spec, mixer, slots) for mixer in spec.mixers)
    return head + 2.0 * decode_parameters(spec) * slots + mixing


def decode_parameters(spec: ModelSpec) -> float:
    """Matrix parameters of all layers that one token is multiplied with."""
    mixers = sum(_mixer_parameters(spec, mixer) for mixer in spec.mixers)
    return mixers + sum(_ffn_parameters(spec, layer.ffn, 1) for layer in spec.layers)


def _read_parameters(spec: ModelSpec, layer: LayerSpec, tokens: int) -> float:
    """Matrix parameters of a layer that a step of `tokens` tokens reads."""
    return _mixer_parameters(spec, layer.mixer) + _ffn_parameters(spec, layer.ffn, tokens, True)


def _mixer_parameters(spec: ModelSpec, mixer: MixerSpec) -> int:
    hidden = spec.hidden_size
    if isinstance(mixer, CompressedSpec):
        return compressed_roofline.parameters(mixer, hidden)
    if isinstance(mixer, GatedDeltaSpec):
        values = mixer.value_heads * mixer.value_dim
        return hidden * (mixer.conv_channels + 2 * values + 2 * mixer.value_heads)
    if isinstance(mixer, MlaSpec):
        q = mixer.num_heads * (mixer.nope_dim + mixer.rope_dim)
        kv = mixer.num_heads * (mixer.nope_dim + mixer.value_dim)
        count = hidden * (mixer.q_lora_rank + mixer.record_dim) + q * mixer.q_lora_rank
        count += kv * mixer.kv_lora_rank + hidden * mixer.num_heads * mixer.value_dim
        if mixer.indexer is not None:
            heads, dim = mixer.indexer.num_heads, mixer.indexer.head_dim
            count += mixer.q_lora_rank * heads * dim + hidden * (dim + heads)
        return count
    query = mixer.num_heads * mixer.head_dim
    count = 2 * hidden * (query + mixer.num_kv_heads * mixer.head_dim)
    count += hidden * query if mixer.output_gate else 0
    if isinstance(mixer, HilsSpec) and mixer.lmk_q == "full":
        count += hidden * query
    elif isinstance(mixer, HilsSpec) and mixer.lmk_q == "lora":
        count += mixer.lora_rank * (hidden + query)
    return count


def _ffn_parameters(spec: ModelSpec, ffn: FfnSpec, tokens: int, read: bool = False) -> float:
    """Parameters that one token is multiplied with or, with `read`, that a step of `tokens` tokens
    reads if each token chooses its experts at random."""
    if isinstance(ffn, DenseFfn):
        return 3 * spec.hidden_size * ffn.intermediate
    missed = (1 - ffn.active / ffn.experts) ** tokens
    experts = ffn.experts * (1 - missed) if read else ffn.active
    width = experts * ffn.intermediate + ffn.shared
    return 3 * spec.hidden_size * width + spec.hidden_size * ffn.experts


def _query_bytes(
    spec: ModelSpec, mixer: MixerSpec, slots: int, size: int, small: str | None
) -> float:
    """Cache bytes that one query at slot `slots` reads and writes in one layer; size: bytes per
    element."""
    if isinstance(mixer, GatedDeltaSpec):
        state = mixer.value_heads * mixer.key_dim * mixer.value_dim
        return 2 * (4 * state + size * mixer.conv_channels * (mixer.conv_kernel - 1))
    if isinstance(mixer, MlaSpec):
        record, key = mixer.record_dim * size, 0
        if small:
            record = mixer.kv_lora_rank + mixer.kv_lora_rank // 32 + 2 * mixer.rope_dim
        if mixer.indexer is not None:
            dim = mixer.indexer.head_dim
            key = dim + SCALE_BYTES if small else dim * size
        read = slots + 1 if mixer.topk is None else min(slots + 1, mixer.topk)
        # Rows of at most topk slots are read whole, without scores.
        scored = slots + 1 if read < slots + 1 else 0
        return record * (read + 1) + key * (scored + 1)
    if isinstance(mixer, CompressedSpec):
        return compressed_roofline.query_bytes(mixer, slots, size)
    head = KV_FORMATS[small].slot_bytes(mixer.head_dim) if small else mixer.head_dim * size
    pair = 2 * mixer.num_kv_heads * head
    if not isinstance(mixer, HilsSpec) or not mixer.selects or not spec.page_size:
        seen = slots + 1 if _window(mixer) is None else min(slots + 1, mixer.window or 0)
        return pair * (seen + 1)
    page = spec.page_size
    candidates = max(0, (slots - mixer.local_window + 1) // page)
    window = slots + 1 - candidates * page
    summary = mixer.summary_heads * mixer.head_dim * size
    summary += BIAS_BYTES * mixer.num_heads if mixer.bias_by_entropy else 0
    selected = min(candidates, mixer.topk) * page
    pooled = (page * pair / 2 + summary) / page if mixer.needs_summary_query else 0.0
    return pair * (window + selected + 1) + candidates * summary + pooled


def _window(mixer: GqaSpec) -> int | None:
    """Slots that a layer sees as it is computed: a landmark layer may be forced to see all."""
    return None if mixer.backend == DENSE else mixer.window


def _mixing_flops(spec: ModelSpec, mixer: MixerSpec, slots: int) -> float:
    """Operations of one mixer over a whole sequence, but for products with weights."""
    if isinstance(mixer, GatedDeltaSpec):
        return 6.0 * mixer.value_heads * mixer.key_dim * mixer.value_dim * slots
    if isinstance(mixer, MlaSpec):
        per_key = 2.0 * mixer.num_heads * (mixer.record_dim + mixer.kv_lora_rank)
        total = per_key * _visible(slots, mixer.topk)
        if mixer.indexer is not None:
            keys = _visible(slots, None)
            total += 2.0 * mixer.indexer.num_heads * mixer.indexer.head_dim * keys
        return total
    if isinstance(mixer, CompressedSpec):
        return compressed_roofline.mixing_flops(mixer, slots)
    query = mixer.num_heads * mixer.head_dim
    if not isinstance(mixer, HilsSpec) or not mixer.selects or not spec.page_size:
        return 4.0 * query * _visible(slots, _window(mixer))
    page = spec.page_size
    past = slots - mixer.local_window + 1
    candidates = _sum_of_pages(past, page)
    few = min(past, mixer.topk * page)
    selected = _sum_of_pages(few, page) + mixer.topk * max(0, past - few)
    span = _visible(slots, None) - candidates * page
    total = 4.0 * query * (span + (page - 1) * selected) + 2.0 * query * candidates
    if mixer.needs_summary_query:
        total += 4.0 * query * (page - 1) / page * slots
    return total


def _sum_of_pages(count: int, page: int) -> int:
    """Sum of x // page for x in 0 .. count - 1."""
    if count <= 0:
        return 0
    whole, rest = divmod(count, page)
    return page * whole * (whole - 1) // 2 + rest * whole


def _visible(slots: int, window: int | None) -> float:
    """Number of (query, key) pairs of causal attention, over a window or (None) all slots."""
    if window is None or slots <= window:
        return slots * (slots + 1) / 2
    return window * (window + 1) / 2 + (slots - window) * window
