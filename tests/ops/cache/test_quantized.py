"""fp8 and fp4 caches: the stored bytes, and every op that reads them against the dequantized
cache."""

import math

import pytest
import torch

from cairn import ops
from cairn.ops import gpu
from cairn.ops.cache import quantized
from cairn.ops.testing import Arguments, Make, Paged, check
from cairn.specs.kv_format import FP4_E2M1, KV_FORMATS
from tests.ops.test_every_op import CHOICES, of_gpu

E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
"""Every number from 0 to 448."""


def worth(x):
    return quantized.dequantize(*quantized.quantize(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_error_is_that_of_four_bits(dtype):
    x = torch.randn(500, 64, generator=torch.Generator().manual_seed(1))
    x = (x * torch.logspace(-4, 3, 500).unsqueeze(1)).to(dtype)
    got, top = worth(x), x.float().abs().amax(-1, keepdim=True)
    # Half a step of 3 bits, or of the smallest step that the slot's scale leaves.
    bound = torch.maximum(x.float().abs() / 16, top * 2.0**-17)
    assert bool(((got - x.float()).abs() <= bound).all())
    assert torch.equal(got.to(torch.bfloat16).float(), got), "exact in bfloat16"
    assert torch.equal(worth(got), got), "stored again it is the same"


@pytest.mark.parametrize("power", [-100, -20, 0, 1, 30, 100])
def test_numbers_of_the_format_stay_what_they_are(power):
    x = (torch.cat([E4M3, -E4M3]) * 2.0**power).unsqueeze(0)
    assert torch.equal(worth(x), x)
    assert int(quantized.quantize(x)[1]) == 127 + power


def test_the_scale_is_the_least_that_holds_the_largest():
    for largest, exponent in ((448.0, 127), (449.0, 128), (224.0, 126), (225.0, 127), (1.75, 119)):
        assert int(quantized.quantize(torch.tensor([[0.1, -largest]]))[1]) == exponent


def test_zeros_nan_and_infinities():
    assert torch.equal(worth(torch.zeros(2, 8)), torch.zeros(2, 8))
    assert torch.equal(worth(torch.full((1, 8), 1e-45)), torch.zeros(1, 8))
    for bad in (math.nan, math.inf, -math.inf):
        x = torch.ones(2, 8)
        x[1, 3] = bad
        got = worth(x)
        assert torch.equal(got[0], x[0]) and bool(got[1].isnan().all())


def test_the_bytes_of_a_slot_tell_the_size_of_a_head():
    for form in KV_FORMATS.values():
        for dim in range(2, 600, 2):
            if form.holds(dim):
                assert form.head_dim(form.slot_bytes(dim)) == dim
        assert form.head_dim(0) is None and form.head_dim(12) is None
    assert FP4_E2M1.slot_bytes(64) == 32 + 4 and FP4_E2M1.slot_bytes(80) == 40 + 5


def test_in_4_bits_numbers_are_the_nearest_of_eight_by_a_scale_of_16():
    """Against a search over all codes; scales are e4m3(max / 6)."""
    steps = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    x = torch.randn(40, 48, generator=torch.Generator().manual_seed(5))
    x = x * torch.logspace(-1, 2, 40).unsqueeze(1)
    x[3] = 0
    numbers, scales = quantized.encode(x, FP4_E2M1)
    assert (numbers.shape, scales.shape) == ((40, 24), (40, 3))
    got = quantized.decode(numbers, scales, FP4_E2M1)
    for block, found in zip(x.view(-1, 16), got.view(-1, 16), strict=True):
        scale = (block.abs().max() / 6).to(torch.float8_e4m3fn).float()
        nearest = (block.abs()[:, None] - steps * scale).abs().argmin(dim=1)
        assert torch.allclose(found, steps[nearest] * scale * block.sign())
    x[0, 20], x[1, 0] = math.inf, math.nan
    bad = quantized.decode(*quantized.encode(x, FP4_E2M1), FP4_E2M1).isnan()
    assert torch.equal(bad.view(-1, 16).all(1).nonzero().flatten(), torch.tensor([1, 3]))
    assert int(bad.sum()) == 32


@pytest.mark.parametrize("form", KV_FORMATS.values(), ids=KV_FORMATS)
def test_a_slot_is_stored_the_same_whenever_it_comes(form):
    """Alone or in a batch, first or last in its page, in a fresh or a used page."""
    width, dtype = form.slot_bytes(16), getattr(torch, form.dtype)
    g = torch.Generator().manual_seed(2)
    k, v = (torch.randn(24, 2, 16, generator=g) * torch.rand(24, 1, 1, generator=g) for _ in "kv")
    location = torch.randperm(40, generator=g)[:24]
    caches = []
    for cuts in ((24,), (1,) * 24, (5, 7, 12)):
        pair = [torch.full((5, 2, 8, width), 255, dtype=torch.uint8).view(dtype) for _ in "kv"]
        if cuts == (5, 7, 12):
            pair = [torch.randint(0, 99, cache.shape, dtype=dtype) for cache in pair]
        at = 0
        for count in cuts:
            part = slice(at, at + count)
            ops.write_kv(k[part], v[part], *pair, location[part])
            at += count
        caches.append([cache[location // 8, :, :] for cache in map(whole, pair)])
    page, inner = torch.arange(24), location % 8
    for pair in caches:
        for stored, given in zip(pair, (k, v), strict=True):
            wanted = quantized.decode(*quantized.encode(given, form), form)
            assert torch.equal(stored[page, :, inner], wanted)


def whole(cache):
    """Every page of a quantized cache in float32."""
    return quantized.take(cache, torch.arange(len(cache), device=cache.device))


def plain(paged: Paged) -> Paged:
    """The dequantized cache."""
    return Paged(whole(paged.k_cache), whole(paged.v_cache), paged.page_table, paged.lengths)


def calls(paged: Paged, dtype: torch.dtype, group: int) -> dict[str, Arguments]:
    """Every op that reads the cache, on the last slots of its rows."""
    make = Make(str(paged.k_cache.device), seed=3)
    heads, size = paged.k_cache.shape[1:3]
    row, slot, _ = paged.queries([min(3, length) for length in paged.lengths])
    q = make.randn(row.numel(), heads * group, 16, dtype=dtype)
    z = make.randint(-3, 4, *q.shape).to(dtype)
    caches = (paged.k_cache, paged.v_cache)
    pages = make.tensor([int(paged.page_table[0, 0]), int(paged.page_table[0, 1])], torch.int64)
    key = make.randint(-2, 3, len(paged.k_cache), heads * group, 16).to(dtype)
    bias = make.randint(0, 5, len(paged.k_cache), heads * group).float() / 4
    indices = (slot // size - 1)[:, None, None].expand(-1, heads, 1).contiguous().int()
    weights = make.rand(row.numel(), heads * group, 1)
    where = (row, slot, paged.page_table)
    return {
        "dense_attention": make.args(q, *caches, *where),
        "window_attention": make.args(q, *caches, *where, size + 1, aligned=True),
        "page_attention": make.args(q, *caches, row, paged.page_table, indices, weights),
        "landmark_attention": make.args(q, z, *caches, key, bias, *where, size, 2, True),
        "prior_summary": make.args(q[:2], caches[0], pages),
        "mean_summary": make.args(caches[0], pages),
        "store_prior_summary": make.args(q[:2], caches[0], pages, key, bias),
    }


READERS = list(calls(Make().paged((9,), 1, 4, 16), torch.float32, 1))


@pytest.mark.parametrize("form", KV_FORMATS.values(), ids=KV_FORMATS)
@pytest.mark.parametrize("name", READERS)
def test_ops_read_what_it_is_worth(name, form, device):
    stored = Make(device).paged((41, 3, 20), 2, 8, 16).quantized(form)
    given = calls(stored, torch.float32, 4)[name]
    expected = calls(plain(stored), torch.float32, 4)[name]
    op = getattr(ops, name)
    got, wanted = op(*given.args, **given.kwargs), op.reference(*expected.args, **expected.kwargs)
    if name == "store_prior_summary":
        got, wanted = given.args[3:5], expected.args[3:5]
    pairs = zip(got, wanted, strict=True) if isinstance(got, tuple) else [(got, wanted)]
    for one, other in pairs:
        torch.testing.assert_close(one, other.to(one.dtype), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not gpu.INTERPRETED, reason="needs Triton, and a machine without CUDA")
@pytest.mark.parametrize(
    "op, name", [p for p in CHOICES if of_gpu(*p.values) and p.values[0].name in READERS]
)
def test_kernels_read_it_when_interpreted(op, name):
    for form in KV_FORMATS.values():
        given = calls(Make().paged((25, 3), 1, 8, 16).quantized(form), torch.float32, 2)[op.name]
        accepted = op.accepts(name, *given.args, **given.kwargs)
        assert accepted or name not in ("triton", "triton_few", "triton_splits")
        if accepted:
            check(op, name, given)


@pytest.mark.skipif(not gpu.INTERPRETED, reason="needs Triton, and a machine without CUDA")
@pytest.mark.parametrize("form", KV_FORMATS.values(), ids=KV_FORMATS)
def test_a_kernel_stores_the_same_bytes_when_interpreted(form):
    g = torch.Generator().manual_seed(4)
    k = torch.cat([E4M3, -E4M3, (E4M3[1:] + E4M3[:-1]) / 2, torch.tensor([448.0, -0.0, 0, 0])])
    k = torch.stack([k, k * 0.99, k * 1.01, torch.randn(k.shape, generator=g), k * 0, k * 2.0**-30])
    k = k.view(6, 3, 128)
    v = torch.randn(k.shape, generator=g) * torch.logspace(-12, 0, 128)
    v[3, 1, 5], v[4, 2, 0] = math.nan, -math.inf
    caches = [quantized.pack(torch.zeros(3, 3, 4, 128), form) for _ in "kv"]
    kernel = [cache.clone() for cache in caches]
    location = torch.tensor([0, 7, -1, 3, 8, 11])
    ops.write_kv.reference(k, v, *caches, location)
    ops.write_kv.using("triton")(k, v, *kernel, location)
    assert bool(whole(caches[1])[0, 1, 3, :16].isnan().all())
    for got, wanted in zip(kernel, caches, strict=True):
        assert torch.equal(got, wanted)
