import pytest

from cairn.bench import roofline
from cairn.bench.roofline import Roofline
from cairn.bench.shapes import SHAPES, config_of
from cairn.models.registry import load_spec, measure_weights
from cairn.specs.hils import HilsSpec
from tests.specs import parameter_count

HSA = load_spec(config_of("345m", "hsa"))
DENSE = load_spec(config_of("345m", "dense"))
PAIR = 2 * 2 * 64 * 2  # bytes of one slot's key and value in one layer, bfloat16


def test_streamed_weights():
    # 16 layers of 15.99M and the head of 102.7M parameters.
    assert roofline.decode_bytes(HSA, 0, 1, "bfloat16") == pytest.approx(717e6, rel=0.002)


def test_decode_reads_window_pages_and_summaries():
    slots, layers = 131072, 16
    candidates = (slots - 511) // 64
    window = slots + 1 - candidates * 64
    base = roofline.decode_bytes(HSA, 0, 1, "bfloat16")
    grown = roofline.decode_bytes(HSA, slots, 1, "bfloat16") - base
    pages = PAIR * (window - 1 + 32 * 64)
    summaries = candidates * (16 * 64 * 2 + 4 * 16)
    assert grown == pytest.approx(layers * (pages + summaries))
    assert summaries == pytest.approx(4.3e6, rel=0.01)


def test_dense_decode_reads_everything():
    grown = roofline.decode_bytes(DENSE, 8192, 3, "bfloat16")
    base = roofline.decode_bytes(DENSE, 0, 3, "bfloat16")
    assert grown - base == 3 * 16 * 8192 * PAIR


def test_quantized_keys_and_values_are_a_byte_a_number():
    grown = [
        roofline.decode_bytes(DENSE, 8192, 1, "bfloat16", small)
        - roofline.decode_bytes(DENSE, 0, 1, "bfloat16", small)
        for small in (None, "fp8_e4m3", "fp4_e2m1")
    ]
    assert grown[0] == 8192 * 16 * PAIR
    assert grown[1] == 8192 * 16 * 2 * 2 * (64 + 1)
    assert grown[2] == 8192 * 16 * 2 * 2 * (32 + 4)
    # Summaries keep their dtype.
    saved = roofline.decode_bytes(HSA, 8192, 1, "bfloat16") - roofline.decode_bytes(
        HSA, 8192, 1, "bfloat16", "fp8_e4m3"
    )
    # At most 32 selected pages and 9 pages of the window of 512 slots, of 64 slots each.
    read = (32 + 9) * 64
    assert 0.9 * read < saved / (16 * (PAIR - 260)) < 1.1 * read


def brute_force_flops(spec, slots):
    """Attention FLOPs, summed over all queries of all layers one by one."""
    total = 0.0
    own = spec.mixers[0]
    width = own.num_heads * own.head_dim
    for query in range(slots):
        if not isinstance(own, HilsSpec):
            total += 4 * width * (query + 1)
            continue
        page = spec.page_size
        candidates = max(0, (query - own.window + 1) // page)
        total += 4 * width * (query + 1 - candidates * page)
        total += 4 * width * (page - 1) * min(candidates, own.topk)
        total += 2 * width * candidates
        total += 4 * width * (page - 1) / page
    return total * spec.num_layers


@pytest.mark.parametrize("spec", [HSA, DENSE], ids=["hsa", "dense"])
@pytest.mark.parametrize("slots", [100, 2000, 6000])
def test_prefill_flops(spec, slots):
    tables = (spec.embedding_rows + spec.head_rows * (not spec.tied)) * spec.hidden_size
    # Norms are not matrix products: a thousandth of the matrices.
    matrices = roofline.decode_parameters(spec)
    assert matrices == pytest.approx(parameter_count(spec) - tables, rel=1e-3)
    head = 2 * spec.vocab_size * spec.hidden_size
    attention = roofline.prefill_flops(spec, slots) - 2 * matrices * slots - head
    assert attention == pytest.approx(brute_force_flops(spec, slots), rel=1e-9)


def test_prefill_at_8k():
    # 657 million operations per slot, as published for this shape; the head is counted once here.
    assert roofline.prefill_flops(HSA, 8192) / 8192 == pytest.approx(657e6, rel=0.03)


def test_measures():
    assert roofline.measure_bandwidth(size=8 << 20) > 1e8
    assert roofline.measure_gemm("float32", size=128) > 1e7


def test_floors():
    line = Roofline(bandwidth=10e9, gemm=1e12, dtype="bfloat16", device="cpu")
    assert line.decode_floor(HSA, 0, 1) == pytest.approx(0.0717, rel=0.01)
    assert line.prefill_floor(HSA, 8192, 2) == pytest.approx(2 * 657e6 * 8192 / 1e12, rel=0.03)


def test_bytes_of_selecting_tokens():
    spec = load_spec(config_of("dsa-lite", "dsa"))
    parameters, _ = measure_weights(spec, "bfloat16")
    assert 15.5e9 < parameters < 17e9
    short, long = 1000, 100_000
    for small, record, key in ((None, 1152, 256), ("fp8_ds", 656, 132)):
        read = [
            roofline.decode_bytes(spec, slots, 2, "bfloat16", small)
            - roofline.decode_bytes(spec, slots, 1, "bfloat16", small)
            for slots in (short, long)
        ]
        # Below the number of selected tokens nothing is scored; above it all tokens are.
        few, many = 27 * (record * (short + 2) + key), 27 * (record * 2049 + key * (long + 2))
        assert read[1] - read[0] == pytest.approx(many - few, rel=1e-6)


@pytest.mark.parametrize(
    ("shape", "parameters", "gigabytes"),
    [("dsa-lite", 15.7e9, 31.5), ("dsa-lite-fp8", 15.7e9, 17), ("glm-slice", 62.4e9, 65)],
)
def test_shapes_that_select_tokens_fit_one_gpu(shape, parameters, gigabytes):
    count, size = measure_weights(load_spec(config_of(shape, "dsa")), "bfloat16")
    assert count == pytest.approx(parameters, rel=0.02)
    assert size < gigabytes * 1e9 < 72e9


HYBRIDS = {
    # Parameters in billions; milliseconds at 3 TB/s of a step of 1 row and of 64, at 8192 slots. Of
    # quantised layers all but embedding and head have a byte a number.
    "q35-2b": (1.88, 1.30, 4.24),
    "q35-9b": (8.95, 5.41, 13.2),
    "q35-35b-a3b": (34.7, 1.25, 16.5),
    "qwen3-8b": (8.19, 5.45, 30.8),
}


@pytest.mark.parametrize("shape", HYBRIDS)
def test_published_geometries(shape):
    """Names are valid, and floors equal values computed by hand."""
    billions, *floors = HYBRIDS[shape]
    (kind,) = SHAPES[shape]
    spec = load_spec(config_of(shape, kind))
    parameters, _ = measure_weights(spec, "bfloat16")
    assert parameters / 1e9 == pytest.approx(billions, rel=0.01)
    line = Roofline(bandwidth=3e12, gemm=8e14, dtype="bfloat16", device="cpu")
    for batch, floor in zip((1, 64), floors, strict=True):
        assert line.decode_floor(spec, 8192, batch) * 1e3 == pytest.approx(floor, rel=0.02)
