"""All automatic choices with their reasons, and errors."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.config import (
    GIB,
    EngineConfig,
    EngineOptions,
    Machine,
    default_model_path,
    resolve,
)
from cairn.errors import BadConfig, BadRequest
from cairn.models.registry import load_spec
from cairn.specs.layer_list import format_layers, parse_layers
from cairn.specs.speculation import most_drafts
from tests.specs import dense_spec, hils_of, landmark_spec

LANDMARKS, PLAIN = landmark_spec(), dense_spec()
LAPTOP = Machine(has_cuda=False, native_bf16=False, free_memory=10 * GIB)
SERVER = Machine(has_cuda=True, native_bf16=True, free_memory=80 * GIB)


def settle(model=LANDMARKS, machine=LAPTOP, **options) -> EngineConfig:
    return resolve(EngineOptions(**options), model, machine)


def reasons(config: EngineConfig) -> dict[str, str]:
    return {choice.name: choice.reason for choice in config.choices}


def test_nothing_is_left_open():
    config = settle()
    assert config.dtype == "float32"
    assert config.device == "cpu"
    assert Counter(mixer.backend for mixer in config.model.mixers) == {"dense": 9, "hsa": 3}
    assert config.page_size == 64
    assert config.model.selecting_layers == (3, 7, 11)
    hils = hils_of(config.model)
    assert (hils.topk, hils.window, hils.strategy) == (32, 512, "hils")
    assert config.chunked_prefill_size == 17 * 64
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


def test_options_given_by_the_user_have_no_reason():
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


def test_dtypes_that_a_gpu_does_not_have():
    old = replace(SERVER, native_bf16=False)
    assert settle(machine=old).dtype == "float32"
    assert settle(replace(LANDMARKS, dtype="float16"), old).dtype == "float16"
    with pytest.raises(BadConfig, match="bfloat16, which this GPU does not have"):
        settle(machine=old, dtype="bfloat16")


def test_pages_in_fewer_bits():
    assert settle().kv_cache_dtype == settle().dtype == "float32"
    assert settle(kv_cache_dtype="fp8_e4m3").kv_cache_dtype == "fp8_e4m3"
    assert settle(machine=SERVER, kv_cache_dtype="fp4_e2m1").kv_cache_dtype == "fp4_e2m1"
    assert settle(machine=SERVER, kv_cache_dtype="bf16").kv_cache_dtype == "bfloat16"
    with pytest.raises(BadConfig, match="kv_cache_dtype is bf16, but dtype is float32"):
        settle(kv_cache_dtype="bf16")
    with pytest.raises(BadConfig, match="kv_cache_dtype is 'fp8'.*fp8_e4m3"):
        EngineOptions(kv_cache_dtype="fp8")


def test_half_of_a_bfloat16_checkpoint_warns():
    (warning,) = settle(machine=SERVER, dtype="float16").warnings
    assert "65504" in warning
    assert settle(replace(LANDMARKS, dtype="float16"), SERVER).warnings == ()


def test_device():
    assert settle(machine=SERVER).device == "cuda"
    assert settle(machine=SERVER, device="cpu").device == "cpu"
    assert settle(machine=SERVER).chunked_prefill_size == 16_896
    with pytest.raises(BadConfig, match="no CUDA device is here"):
        settle(device="cuda")


def test_steps_are_longer_where_products_are_faster():
    machine = replace(LAPTOP, native_bf16=True)
    sizes = [
        settle(machine=machine, dtype=dtype).chunked_prefill_size
        for dtype in ("float32", "bfloat16")
    ]
    assert sizes == [17 * 64, 33 * 64]


def test_a_target_between_tokens():
    config = settle(itl_target_ms=50)
    assert (config.itl_target_ms, config.chunked_prefill_size) == (50, 17 * 64)
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
    assert (
        Counter(mixer.backend for mixer in config.model.mixers) == {"dense": 12}
        and config.page_size == 64
    )
    assert config.model == PLAIN
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
    hils = hils_of(config.model)
    assert (hils.topk, hils.window, hils.strategy) == (8, 256, "head")
    assert config.model.selecting_layers == ()  # dense
    assert [m.backend for m in config.model.mixers][3::4] == ["dense", "dense", "window"]
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


def test_pages_on_a_gpu_get_what_is_left_of_a_share():
    config = settle(machine=SERVER)
    assert (config.kv_cache_memory, config.gpu_memory_utilization) == (None, 0.9)
    assert "gpu_memory_utilization" in reasons(config)
    config = settle(machine=SERVER, gpu_memory_utilization=0.5)
    assert (config.kv_cache_memory, config.gpu_memory_utilization) == (None, 0.5)
    config = settle(machine=SERVER, kv_cache_memory="1GiB")
    assert (config.kv_cache_memory, config.gpu_memory_utilization) == (GIB, None)
    assert not {"gpu_memory_utilization", "kv_cache_memory"} & set(reasons(config))


@pytest.mark.parametrize("share", [0, -0.1, 1.5, True, "0.9", float("nan")])
def test_a_share_that_is_none(share):
    with pytest.raises(BadConfig, match="gpu_memory_utilization must be a share"):
        EngineOptions(gpu_memory_utilization=share)


def test_a_share_where_it_means_nothing():
    with pytest.raises(BadConfig, match="the device is cpu.*--kv-cache-memory"):
        settle(gpu_memory_utilization=0.5)
    with pytest.raises(BadConfig, match="Give one of the two"):
        EngineOptions(gpu_memory_utilization=0.5, kv_cache_memory=1000)


def test_the_default_model_is_in_the_package():
    assert (default_model_path() / "config.json").is_file()


def test_speculation():
    assert settle().speculation is None
    found = settle(speculative_algorithm="NGRAM").speculation
    assert (found.algorithm, found.drafts, found.match) == ("NGRAM", 8, (2, 12))
    assert found.branches == 1
    wide = settle(speculative_algorithm="NGRAM", speculative_eagle_topk=3).speculation
    assert (wide.drafts, wide.branches) == (8, 3)
    given = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 3}
    for config in (given, json.dumps(given)):
        found = settle(PLAIN, speculative_config=config).speculation
        assert (found.drafts, found.match) == (4, (3, 12))


def test_a_page_is_no_candidate_before_its_landmark_is_written_for_good():
    """The maximum number of guesses k with k + ceil(k / 63) < 512."""
    assert settle(speculative_algorithm="NGRAM", speculative_num_draft_tokens=503).speculation
    words = r"is 504.*at most 503: k \+ ceil\(k / 63\) must stay below its window of 512"
    with pytest.raises(BadConfig, match=words):
        settle(speculative_algorithm="NGRAM", speculative_num_draft_tokens=504)
    for size, window in ((4, 4), (4, 8), (8, 20), (16, 32)):
        model = landmark_spec(chunk_size=size, hils_sliding_window=window)
        allowed = [k for k in range(1, 100) if k + math.ceil(k / (size - 1)) < window]
        assert most_drafts(model) == max(allowed)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"speculative_algorithm": "EAGLE3"}, "'EAGLE3': draft models .* not supported. Use NGRAM"),
        ({"speculative_algorithm": "ngrams"}, "is 'ngrams'. Use NGRAM"),
        ({"speculative_num_draft_tokens": 3}, "no speculative_algorithm is given"),
        (
            {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 0},
            "positive integer, not 0",
        ),
        (
            {
                "speculative_config": {
                    "method": "ngram",
                    "prompt_lookup_min": 20,
                    "prompt_lookup_max": 12,
                }
            },
            "min_match_window_size is 20, but the longest match is 12",
        ),
        ({"speculative_algorithm": "NEXTN"}, "this model has no draft layer of its own"),
        (
            {"speculative_algorithm": "NGRAM", "speculative_num_steps": 2},
            "speculative_num_steps is 2, but NGRAM has no such option",
        ),
        ({"speculative_config": "{"}, "not JSON"),
        ({"speculative_config": "[]"}, "must be a JSON object"),
        ({"speculative_config": {"num_speculative_tokens": 3}}, "names no method"),
        ({"speculative_config": {"method": "eagle"}}, "'EAGLE': draft models"),
        ({"speculative_config": {"method": "ngram", "model": "x"}}, "has model: 'x'"),
        (
            {
                "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
                "speculative_num_draft_tokens": 4,
            },
            "is 4, but speculative_config says 3",
        ),
    ],
    ids=str,
)
def test_speculation_that_cannot_be(options, words):
    with pytest.raises(BadConfig, match=words):
        settle(**options)


def test_a_models_own_draft_layer():
    model = load_spec({"model_type": "qwen3_5_text"})
    assert settle(model).model.draft is None
    for options in (
        {"speculative_algorithm": "NEXTN", "speculative_num_steps": 3},
        {"speculative_config": {"method": "qwen3_5_mtp", "num_speculative_tokens": 3}},
        {
            "speculative_algorithm": "NEXTN",
            "speculative_num_steps": 3,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": 4,
        },
    ):
        config = settle(model, **options)
        assert (config.speculation.algorithm, config.speculation.drafts) == ("NEXTN", 3)
        assert config.model.draft is model.draft_layer is not None
        assert len(config.model.mixers) == config.model.num_layers + 1
    for options, words in (
        ({"speculative_num_draft_tokens": 4, "speculative_eagle_topk": 2}, "make 3 tokens"),
        ({"speculative_num_draft_tokens": 4}, "draft_tokens is 4.* make 2 tokens"),
        ({"speculative_ngram_max_match_window_size": 4}, "NEXTN has no such option"),
    ):
        with pytest.raises(BadConfig, match=words):
            settle(model, speculative_algorithm="NEXTN", **options)
