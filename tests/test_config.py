"""Every automatic choice with its reason, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.config import (
    GIB,
    EngineConfig,
    EngineOptions,
    Machine,
    MemoryPlan,
    ModelFacts,
    default_model_path,
    format_layers,
    parse_layers,
    plan_memory,
    resolve,
)
from cairn.errors import BadConfig, BadRequest, OutOfMemory

LANDMARKS = ModelFacts(
    page_size=64,
    landmarks=True,
    landmark_id=1000,
    max_model_len=131072,
    dtype="bfloat16",
    landmark_layers=(3, 7, 11),
    num_layers=12,
    topk=32,
    window=512,
)
PLAIN = ModelFacts(None, False, 1000, 32768, "bfloat16", (), 12, None, None)
LAPTOP = Machine(has_cuda=False, native_bf16=False, free_memory=10 * GIB)
SERVER = Machine(has_cuda=True, native_bf16=True, free_memory=80 * GIB)


def settle(model=LANDMARKS, machine=LAPTOP, **options) -> EngineConfig:
    return resolve(EngineOptions(**options), model, machine)


def reasons(config: EngineConfig | MemoryPlan) -> dict[str, str]:
    return {choice.name: choice.reason for choice in config.choices}


def test_nothing_is_left_open():
    config = settle()
    assert config.dtype == "float32"
    assert config.device == "cpu"
    assert config.attention_backend == "hsa"
    assert config.page_size == 64
    assert config.landmark_layers == (3, 7, 11)
    assert (config.topk, config.window, config.strategy) == (32, 512, "hils")
    assert config.chunked_prefill_size == 1024
    assert config.kv_cache_memory == int(0.4 * 10 * GIB)
    assert config.warnings == ()
    assert "3 of 12 layers" in reasons(config)["attention_backend"]
    assert set(reasons(config)) == {
        "device",
        "dtype",
        "attention_backend",
        "page_size",
        "chunked_prefill_size",
        "kv_cache_memory",
    }


def test_what_the_user_chose_needs_no_reason():
    config = settle(
        dtype="float32", device="cpu", chunked_prefill_size=7, kv_cache_memory=1000, page_size=64
    )
    assert set(reasons(config)) == {"attention_backend", "page_size"}
    assert str(config.choices[0]).startswith("page_size=64  because ")


@pytest.mark.parametrize(
    ("model", "machine", "device", "expected"),
    [
        ("bfloat16", LAPTOP, "cpu", "float32"),
        ("bfloat16", replace(LAPTOP, native_bf16=True), "cpu", "bfloat16"),
        ("float16", replace(LAPTOP, native_bf16=True), "cpu", "bfloat16"),
        ("float32", replace(LAPTOP, native_bf16=True), "cpu", "float32"),
        ("bfloat16", SERVER, "auto", "bfloat16"),
        ("float16", SERVER, "cuda:1", "float16"),
    ],
)
def test_dtype(model, machine, device, expected):
    facts = replace(LANDMARKS, dtype=model)
    config = settle(facts, machine, device=device)
    assert config.dtype == expected
    assert settle(facts, machine, device=device, dtype="float16").dtype == "float16"


def test_device():
    assert settle(machine=SERVER).device == "cuda"
    assert settle(machine=SERVER, device="cpu").device == "cpu"
    assert settle(machine=SERVER).chunked_prefill_size == 8192
    with pytest.raises(BadConfig, match="no CUDA device is here"):
        settle(device="cuda")


def test_a_target_between_tokens():
    config = settle(itl_target_ms=50)
    assert (config.itl_target_ms, config.chunked_prefill_size) == (50, 1024)
    assert "itl_target_ms" in reasons(config)["chunked_prefill_size"]
    assert settle().itl_target_ms is None
    assert "no itl_target_ms" in reasons(settle())["chunked_prefill_size"]


@pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf"), True, "50"])
def test_a_target_that_is_no_duration(bad):
    with pytest.raises(BadConfig, match="itl_target_ms must be a positive number"):
        EngineOptions(itl_target_ms=bad)


def test_a_target_and_a_fixed_chunk_contradict_each_other():
    with pytest.raises(BadConfig, match=r"itl_target_ms is 50 and chunked_prefill_size is 512.*"):
        EngineOptions(itl_target_ms=50, chunked_prefill_size=512)


def test_a_model_without_landmarks():
    config = settle(PLAIN)
    assert (config.attention_backend, config.page_size) == ("dense", 64)
    assert (config.landmark_layers, config.topk, config.window) == ((), None, None)
    assert settle(PLAIN, page_size=16).page_size == 16
    for option in (
        {"hsa_topk": 3},
        {"hsa_layers": "0"},
        {"hsa_window_size": 4},
        {"hsa_selection_strategy": "head"},
        {"attention_backend": "hsa"},
        {"attention_backend": "window"},
    ):
        with pytest.raises(BadConfig):
            settle(PLAIN, **option)


def test_overrides_that_contradict_the_model_warn():
    config = settle(
        hsa_topk=8,
        hsa_window_size=256,
        hsa_layers="3,7",
        hsa_selection_strategy="head",
        attention_backend="dense",
    )
    assert (config.topk, config.window, config.strategy) == (8, 256, "head")
    assert config.landmark_layers == (3, 7)
    assert len(config.warnings) == 5
    assert all("contradicts" in warning for warning in config.warnings)
    same = settle(hsa_topk=32, hsa_window_size=512, hsa_layers=[11, 7, 3], hsa_lmk_id=1000)
    assert same.warnings == ()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"page_size": 16}, "page_size is 16.*chunk_size 64.*--page-size 64"),
        ({"hsa_lmk_id": 7}, "hsa_lmk_id is 7.*1000"),
        ({"hsa_layers": "0"}, r"names \[0\].*3,7,11"),
        ({"hsa_layers": "12"}, "layer 12, but the model has 12"),
    ],
)
def test_impossible_overrides_name_the_right_value(options, words):
    with pytest.raises(BadConfig, match=words):
        settle(**options)


def test_unknown_option_names_the_nearest():
    with pytest.raises(BadRequest, match="Did you mean 'page_size'"):
        EngineOptions(page_sise=64)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4GiB", 4 << 30),
        ("4g", 4 << 30),
        ("1.5 MiB", 3 << 19),
        ("2GB", 2_000_000_000),
        ("500kb", 500_000),
        ("1T", 1 << 40),
        ("123", 123),
        ("99B", 99),
        (77, 77),
    ],
)
def test_sizes(text, count):
    assert settle(kv_cache_memory=text).kv_cache_memory == count


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "4 apples", "1..2GiB", "nan", "0", 0, -5, True, 1.5, float("nan")]
)
def test_sizes_that_are_none(text):
    with pytest.raises(BadConfig, match="kv_cache_memory"):
        settle(kv_cache_memory=text)


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("0", (0,)),
        ("0-3,7", (0, 1, 2, 3, 7)),
        (" 7 , 1 - 2 ", (1, 2, 7)),
        ("3-3,3", (3,)),
        ([5, 1, 1], (1, 5)),
        (range(2), (0, 1)),
        ([], ()),
        (4, (4,)),
    ],
)
def test_layers(text, layers):
    assert parse_layers(text, 8) == layers


@pytest.mark.parametrize(
    "text", ["", "a", "1-", "-1", "3-1", "1;2", "8", "0-99999999999", [8], [-1], ["1"], [True], 1.5]
)
def test_layers_that_are_none(text):
    with pytest.raises(BadConfig, match="hsa_layers"):
        parse_layers(text, 8)


@given(st.sets(st.integers(0, 40)))
def test_layers_survive_writing_and_reading(layers):
    text = format_layers(sorted(layers))
    assert not layers or parse_layers(text, 41) == tuple(sorted(layers))
    assert len(text) <= len(",".join(map(str, sorted(layers))))


def plan(bytes_per_page=1000, model=LANDMARKS, **options) -> MemoryPlan:
    given = EngineOptions(**options)
    return plan_memory(given, resolve(given, model, LAPTOP), model, bytes_per_page)


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
    with pytest.raises(BadConfig, match="131073.*131072"):
        plan(max_model_len=131073)


def test_the_default_model_is_in_the_package():
    assert (default_model_path() / "config.json").is_file()
