"""The memory plan: what it allows fits, and what does not fit names the option to change."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.attention.registry import cache_schema, most_pages
from cairn.bench.shapes import config_of
from cairn.cache.landmarks import SlotMap
from cairn.config import GIB, EngineOptions, Machine, resolve
from cairn.engine.build import page_format
from cairn.engine.memory import (
    MemoryPlan,
    PageBytes,
    Usage,
    check_host,
    check_pages,
    plan_memory,
    room_for_pages,
)
from cairn.errors import BadConfig, OutOfMemory
from cairn.models.registry import load_spec
from tests.specs import landmark_spec, parameter_count

LANDMARKS = landmark_spec()
LAPTOP = Machine(has_cuda=False, native_bf16=False, free_memory=10 * GIB)
SERVER = Machine(has_cuda=True, native_bf16=True, free_memory=80 * GIB)
USAGE = Usage(total=1000_000, others=50_000, weights=300_000, activations=100_000, graphs=20_000)


ALIKE = PageBytes(1000)
MIXED = PageBytes(250, window=750, reach=8)
FRAMED = PageBytes(100, window=750, reach=8, host=750, selected=4)


def plan(page_bytes=ALIKE, model=LANDMARKS, usage=None, **options) -> MemoryPlan:
    given = EngineOptions(**options)
    config = resolve(given, model, LAPTOP if usage is None else SERVER)
    return plan_memory(given, config, model, page_bytes, room_for_pages(config, usage))


def reasons(found: MemoryPlan) -> dict[str, str]:
    return {choice.name: choice.reason for choice in found.choices}


@given(
    memory=st.integers(1000, 10**7),
    length=st.none() | st.integers(1, 2000),
    rows=st.integers(1, 9),
    landmarks=st.booleans(),
)
def test_the_plan_fits_and_holds_what_it_promises(memory, length, rows, landmarks):
    model = replace(LANDMARKS, landmarks=landmarks)
    options = {"kv_cache_memory": memory, "max_model_len": length, "max_num_seqs": rows}
    per_page = 63 if landmarks else 64
    if length is not None and memory // 1000 * per_page < length:
        with pytest.raises(OutOfMemory, match=f"max_model_len {length} .* {memory}"):
            plan(model=model, **options)
        return
    found = plan(model=model, **options)
    assert found.num_pages * 1000 <= memory
    assert found.num_pages * per_page >= found.max_model_len
    assert found.num_pages <= rows * -(-found.max_model_len // per_page)
    assert found.max_model_len == (length or min(131072, found.num_pages * per_page))


def test_a_host_that_has_less_than_was_asked_for():
    found = plan(MIXED, kv_cache_memory=10_000)
    taken = sum(count for _, count in found.table(0, None))
    check_host(found, taken)
    with pytest.raises(OutOfMemory, match=rf"take {taken} .*--kv-cache-memory. to at most 9000"):
        check_host(found, 9000)


def test_reasons_of_the_length():
    assert "made for it" in reasons(plan(kv_cache_memory="1GiB"))["max_model_len"]
    assert "what kv_cache_memory holds" in reasons(plan(kv_cache_memory=5000))["max_model_len"]
    assert reasons(plan(kv_cache_memory=5000, max_model_len=100)) == {}


def test_too_little_memory_names_what_is_needed():
    with pytest.raises(OutOfMemory, match="at least 16000"):
        plan(kv_cache_memory=9000, max_model_len=1000)
    assert plan(kv_cache_memory=16000, max_model_len=1000).max_model_len == 1000
    with pytest.raises(OutOfMemory, match="one page needs 1000"):
        plan(kv_cache_memory=999)


def test_longer_than_the_model():
    with pytest.raises(BadConfig, match=r"131073.*131072.*--allow-long-max-model-len"):
        plan(max_model_len=131073)
    options = EngineOptions(max_model_len=131073, allow_long_max_model_len=True)
    config = resolve(options, LANDMARKS, LAPTOP)
    assert config.model.max_model_len == 131073 and "131072" in config.warnings[0]


@given(
    parts=st.tuples(*[st.integers(0, 400_000)] * 4),
    share=st.floats(0.05, 1),
    length=st.none() | st.integers(1, 30_000),
)
def test_a_gpu_is_never_promised_more_than_its_share(parts, share, length):
    usage = Usage(1000_000, *parts)
    options = {"gpu_memory_utilization": share, "max_model_len": length, "max_num_seqs": 1}
    try:
        found = plan(usage=usage, **options)
    except OutOfMemory as error:
        left = int(share * 1000_000) - usage.taken
        assert left < max(1, -(-(length or 1) // 63)) * 1000
        # The suggested value works, if it is a number.
        least = re.search(r"gpu-memory-utilization\) to at least ([0-9.]+)", str(error))
        if least:
            assert plan(usage=usage, **options | {"gpu_memory_utilization": float(least[1])})
        return
    table = dict(found.table(usage.weights, usage))
    assert sum(table.values()) == usage.total
    assert usage.taken + table["pages"] <= share * usage.total
    assert found.num_pages * 63 >= found.max_model_len


def test_the_table_says_where_a_gpu_goes():
    found = plan(usage=USAGE)
    assert found.table(USAGE.weights, USAGE) == (
        ("weights", 300_000),
        ("activations", 100_000),
        ("graphs", 20_000),
        ("pages", 430_000),
        ("other uses", 50_000),
        ("free", 100_000),
    )
    assert found.flag == "--gpu-memory-utilization SHARE"
    assert "what weights and steps leave of 0.9" in reasons(found)["kv_cache_memory"]
    fixed = plan(usage=USAGE, kv_cache_memory=100_000)
    assert (fixed.num_pages, fixed.flag) == (100, "--kv-cache-memory SIZE")
    assert plan(kv_cache_memory=5000).table(7, None) == (("weights", 7), ("pages", 5000))


@pytest.mark.parametrize(
    ("usage", "options", "remedy"),
    [
        (USAGE, {"kv_cache_memory": 600_000}, "kv-cache-memory) to at most 530000"),
        (USAGE, {"gpu_memory_utilization": 0.4}, "gpu-memory-utilization) to at least 0.48"),
        (USAGE, {"gpu_memory_utilization": 0.4, "max_model_len": 1000}, "to at least 0.49"),
        (replace(USAGE, weights=990_000), {}, "more memory"),
        (replace(USAGE, weights=990_000), {"dtype": "float32"}, "--dtype bfloat16"),
        (replace(USAGE, activations=900_000), {}, "--chunked-prefill-size), which is 16896"),
        (USAGE, {"max_model_len": 30_000}, "gpu-memory-utilization) to at least 0.95"),
        (USAGE, {"max_model_len": 40_000}, "Lower max_model_len"),
        (USAGE, {"kv_cache_memory": 9000, "max_model_len": 1000}, "memory) to at least 16000"),
        (USAGE, {"kv_cache_memory": 9000, "max_model_len": 40_000}, "Lower max_model_len"),
    ],
)  # fmt: skip
def test_out_of_memory_names_one_option(usage, options, remedy):
    with pytest.raises(OutOfMemory, match=re.escape(remedy)) as caught:
        plan(usage=usage, **options)
    assert "\n" not in str(caught.value)
    assert sum(f"--{name}" in str(caught.value) for name in (
        "kv-cache-memory", "gpu-memory-utilization", "dtype", "chunked-prefill-size",
        "max-model-len")) <= 1  # fmt: skip


@given(
    memory=st.integers(1000, 10**7),
    length=st.none() | st.integers(1, 100_000),
    rows=st.integers(1, 9),
    chunk=st.integers(1, 5000),
)
def test_window_layers_own_pages_are_planned_too(memory, length, rows, chunk):
    """Both pools fit; one sequence can always run the largest step and keep its window."""
    options = {"kv_cache_memory": memory, "max_model_len": length, "max_num_seqs": rows}
    options["chunked_prefill_size"] = chunk
    step = MIXED.reach + chunk // 64 + 2
    try:
        found = plan(MIXED, **options)
    except OutOfMemory as error:
        need = int(re.search("at least ([0-9]+)", str(error))[1])
        assert need > memory
        assert plan(MIXED, **options | {"kv_cache_memory": need}).num_pages * 63 >= (length or 1)
        return
    assert found.num_pages * 250 + found.window_pages * 750 <= memory
    assert sum(dict(found.table(0, None)).values()) <= memory
    assert min(step, found.num_pages) <= found.window_pages <= found.num_pages
    assert found.num_pages * 63 >= found.max_model_len == (length or found.max_model_len)
    assert found.num_pages <= rows * -(-found.max_model_len // 63)
    # At least as many tokens as if all layers kept all pages; all tokens if there is room.
    alike = plan(**options | {"max_model_len": None})
    assert found.num_pages >= min(alike.num_pages, found.num_pages if length else 10**9)
    if found.num_pages == rows * -(-found.max_model_len // 63):
        assert found.window_pages == min(found.num_pages, (memory - found.num_pages * 250) // 750)


@given(
    memory=st.integers(1000, 10**6),
    host=st.integers(1000, 10**7),
    length=st.none() | st.integers(1, 10_000),
    rows=st.integers(1, 9),
    chunk=st.integers(1, 5000),
)
def test_frames_take_what_summaries_and_windows_leave(memory, host, length, rows, chunk):
    options = {"kv_cache_memory": memory, "max_model_len": length, "max_num_seqs": rows}
    options |= {"chunked_prefill_size": chunk, "kv_host_memory": host, "kv_host_tier": True}
    step = FRAMED.reach + chunk // 64 + 2
    try:
        found = plan(FRAMED, **options)
    except OutOfMemory as error:
        flag, need = re.search(r"--kv-(host|cache)-memory\) to at least (\d+)", str(error)).groups()
        assert int(need) > options[f"kv_{flag}_memory"]
        return
    assert sum(dict(found.table(0, None)).values()) <= memory and found.host_bytes <= host
    assert found.frames >= FRAMED.selected
    assert min(step, found.num_pages) <= found.window_pages <= found.num_pages
    assert found.num_pages * 63 >= found.max_model_len == (length or found.max_model_len)


def test_a_model_with_window_layers_holds_more():
    """Three of four layers look back 512 slots: the same memory holds 2.5 times the tokens."""
    options = {"kv_cache_memory": 2_000_000, "max_num_seqs": 4, "chunked_prefill_size": 4096}
    alike, mixed = plan(**options), plan(MIXED, **options)
    assert (alike.num_pages, mixed.num_pages) == (2000, 5657)
    assert mixed.window_pages == 74 + 5657 // 8
    assert mixed.table(7, None)[1:] == (("pages", 1_414_250), ("window pages", 585_750))
    assert alike.max_model_len < mixed.max_model_len == 131072


def test_a_long_sequence_costs_kept_window_pages_first():
    options = {"max_model_len": 63 * 2000, "max_num_seqs": 1, "chunked_prefill_size": 4096}
    least = 2000 * 250 + 74 * 750
    found = plan(MIXED, kv_cache_memory=least, **options)
    assert (found.num_pages, found.window_pages) == (2000, 74)
    with pytest.raises(OutOfMemory, match=f"at least {least}"):
        plan(MIXED, kv_cache_memory=least - 1, **options)
    assert plan(MIXED, kv_cache_memory=10**7, **options).window_pages == 2000


def test_7b_at_128k_tokens_fits_a_card_of_80_gb():
    """32 layers of 32 heads of 128 in bfloat16, 8 of them with landmarks. With pages for all layers
    it would need 67 GB."""
    spec = load_spec(config_of("7b", "hsa"))
    options = EngineOptions(max_model_len=131072 + 33, max_num_seqs=1)
    config = resolve(options, spec, SERVER)
    sizes = PageBytes.of(cache_schema(config.model.mixers, page_format(config)))
    assert sizes == PageBytes(8 * ((1 << 20) + 8320), 24 << 20, reach=8)
    usage = Usage(79 * GIB, GIB, 2 * parameter_count(spec), activations=8 * GIB, graphs=GIB)
    found = plan_memory(options, config, spec, sizes, room_for_pages(config, usage))
    table = dict(found.table(usage.weights, usage))
    assert found.num_pages * 63 >= 131072 + 33
    assert 16 * GIB < table["pages"] < 17 * GIB
    step = config.chunked_prefill_size // 64 + 10
    assert step <= found.window_pages
    whole = PageBytes(sizes.shared + sizes.window)
    with pytest.raises(OutOfMemory, match="one sequence of max_model_len 131105"):
        plan_memory(options, config, spec, whole, room_for_pages(config, usage))


def test_rows_beyond_the_kernels_of_a_gpu_are_refused():
    slots, most = SlotMap(64, landmarks=True), most_pages(LANDMARKS.mixers)
    assert most is not None
    longest = replace(plan(kv_cache_memory=10**7), max_model_len=most * 63)
    check_pages(longest, slots, most)
    longer = replace(longest, max_model_len=most * 63 + 1)
    check_pages(longer, slots, None)
    said = f"is {most * 63 + 1}, .* {most} pages .*--max-model-len.* at most {most * 63}$"
    with pytest.raises(BadConfig, match=said):
        check_pages(longer, slots, most)
