"""config.json of the landmark families: defaults, derived values, errors."""

from __future__ import annotations

import logging
import math

import pytest
import torch

from cairn.errors import BadModel
from cairn.layers.rotary import Rotary, in_range_frequencies
from cairn.models.registry import load_spec
from cairn.specs.model import describe
from cairn.specs.rotary import RotarySpec
from tests.specs import bytes_per_token, declared, hils_of, kinds, parameter_count

# The released schema's values of absent keys; the window has no default without a sliding window.
DEFAULTS = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    "head_dim": 128, "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "attention_bias": False, "max_position_embeddings": 32768, "rope_theta": 10000.0,
    "rope_scaling": None, "chunk_size": 64, "hils_topk": 16, "use_sliding_window": False,
    "sliding_window": None, "full_attn_interleave": 4, "num_swa_layers": 0,
    "enable_softmax1": True, "enable_prior_query": True, "shared_q_c": False,
    "enable_chunk_pooling": False, "enable_lmk_q_proj": False, "lmk_q_lora_dim": -1,
    "layerwise_qk_norm": False, "layerwise_lmkq_norm": False, "apply_hils_rope": False,
    "enable_inrange_rope": False, "rope_context_length": 32768, "rope_period_multiplier": 1.0,
    "use_hope": False, "hope_partial_ratio": 0.5, "hope_context_length": 32768,
    "insert_landmarks": True, "adjust_lmk_pos": True, "enable_external_lmk_embed": False,
    "mask_lmk_token": False, "use_naive_bsa": False,
}  # fmt: skip


def bare(model_type="qwen_hils", **more):
    return {"model_type": model_type, "hils_sliding_window": 512, **more}


def test_absent_keys_resolve_to_the_defaults():
    resolved = {name: (value, source) for name, value, source in describe(load_spec(bare()))}
    for name, value in DEFAULTS.items():
        assert resolved[name][0] == value, name
        assert not resolved[name][1].startswith("config"), name
    assert resolved["hils_sliding_window"] == (512, "config")


def test_defaults_in_the_spec():
    spec = load_spec(bare())
    assert spec.selecting_layers == tuple(range(3, 32, 4))
    assert (hils_of(spec).softmax1, hils_of(spec).bias_by_entropy, hils_of(spec).summary) == (
        True,
        True,
        "prior",
    )
    assert spec.mixers[3].rotary is None and spec.mixers[0].rotary is not None
    assert kinds(spec)[0] == "full" and hils_of(spec).lmk_q is None
    assert spec.page_size == 64 and spec.landmark_id == 151936
    assert spec.embedding_rows == 151968 and spec.dtype == "float32"


def test_source_names_config_default_override_and_older_key():
    spec = load_spec(bare(hsa_topk=8, enable_softmax1=False), overrides={"full_attn_interleave": 1})
    sources = {name: source for name, _, source in describe(spec)}
    assert sources["hils_topk"] == "config (hsa_topk)" and hils_of(spec).topk == 8
    assert sources["enable_softmax1"] == "config"
    assert sources["full_attn_interleave"] == "override" and len(spec.selecting_layers) == 32
    assert sources["rope_theta"] == "default"


def test_unknown_override_is_refused():
    with pytest.raises(BadModel, match="'hils_topk'"):
        load_spec(bare(), overrides={"hils_topkk": 8})


@pytest.mark.parametrize(
    ("first", "interleave", "expected"),
    [(0, 1, range(8)), (2, 1, range(2, 8)), (0, 4, (3, 7)), (1, 3, (3, 6)), (0, 0, ()), (9, 1, ())],
)
def test_which_layers_have_landmarks(first, interleave, expected):
    spec = load_spec(
        bare(num_hidden_layers=8, num_swa_layers=first, full_attn_interleave=interleave)
    )
    assert spec.selecting_layers == tuple(expected)
    assert (hils_of(spec) is None) == (not tuple(expected))


def test_qwen_windows():
    spec = load_spec({"model_type": "qwen_hils", "use_sliding_window": True, "sliding_window": 100})
    assert {mixer.window for mixer in spec.mixers} == {100} and hils_of(spec).window == 100
    spec = load_spec(bare(sliding_window=100))
    assert spec.mixers[0].window is None and spec.mixers[3].window == 512
    null = load_spec(bare(use_sliding_window=True, sliding_window=None))
    assert kinds(null)[0] == "full"


def test_olmo_windows_follow_layer_types():
    base = bare("olmo_hils", num_hidden_layers=4, use_sliding_window=True, sliding_window=100)
    base["adjust_lmk_pos"] = True
    spec = load_spec(base)
    assert kinds(spec) == ["window"] * 3 + ["hils"]
    types = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    spec = load_spec(base | {"layer_types": types})
    assert [mixer.window for mixer in spec.mixers] == [None, 100, None, 512]
    dense = load_spec(base | {"replace_full_attention_with_hils": False})
    assert [mixer.window for mixer in dense.mixers] == [100, 100, 100, None]
    assert hils_of(dense) is None and dense.landmarks
    assert kinds(load_spec(bare(layer_types=types, num_hidden_layers=4)))[1] == "full"


def test_rows():
    rows = {"vocab_size": 100278}
    for extra in ({}, {"enable_external_lmk_embed": True}, {"insert_landmarks": False}):
        assert load_spec(bare(**rows, **extra)).embedding_rows == 100288
    assert load_spec(bare(vocab_size=287)).embedding_rows == 288
    olmo = load_spec(bare("olmo_hils", **rows, adjust_lmk_pos=True))
    assert (olmo.embedding_rows, olmo.head_rows) == (100288, 100288)
    external = load_spec(bare("olmo_hils", **rows, enable_external_lmk_embed=True))
    assert (external.embedding_rows, external.head_rows) == (100278, 100278)
    assert load_spec(bare("olmo_hils", **rows, insert_landmarks=False)).embedding_rows == 100278


def test_null_kv_heads_means_all_heads():
    assert (
        load_spec(bare(num_key_value_heads=None, num_attention_heads=16)).mixers[0].num_kv_heads
        == 16
    )


def test_norms_and_biases_by_layer_kind():
    spec = load_spec(bare(attention_bias=True, rms_norm_eps=1e-2, layerwise_qk_norm=True))
    plain, hils = spec.mixers[0], spec.mixers[3]
    assert (plain.bias, plain.qk_eps, plain.qk_norm) == (True, 1e-2, "head")
    assert (hils.bias, hils.qk_eps, hils.qk_norm) == (False, 1e-6, "full")
    olmo = load_spec(bare("olmo_hils", adjust_lmk_pos=True, mask_lmk_token=True))
    assert (olmo.mixers[0].qk_norm, olmo.mixers[3].qk_norm) == ("full", "head")
    assert olmo.layers[0].names.mixer_norm is None and olmo.mixers[0].mask_landmarks


@pytest.mark.parametrize(
    ("switches", "summary", "bias", "heads", "query"),
    [
        ({}, "prior", True, 32, True),
        ({"shared_q_c": True}, "prior", True, 32, True),
        ({"enable_chunk_pooling": True}, "mean", True, 8, True),
        ({"enable_chunk_pooling": True, "enable_prior_query": False}, "mean", False, 8, False),
        ({"enable_prior_query": False}, "landmark", False, 8, False),
        ({"compact_lmk_k": True}, "landmark", True, 8, True),
        ({"compressed_lmk_k": True}, "prior", True, 8, True),
    ],
)
def test_summaries(switches, summary, bias, heads, query):
    spec = load_spec(bare(num_key_value_heads=8, **switches))
    assert (hils_of(spec).summary, hils_of(spec).bias_by_entropy) == (summary, bias)
    assert hils_of(spec).summary_heads == heads and hils_of(spec).needs_summary_query == query


def test_landmark_query_kinds():
    assert hils_of(load_spec(bare(lmk_q_lora_dim=8))).lmk_q is None
    assert hils_of(load_spec(bare(enable_lmk_q_proj=True))).lmk_q == "full"
    assert hils_of(load_spec(bare(enable_lmk_q_proj=True, lmk_q_lora_dim=0))).lmk_q == "full"
    lora = hils_of(load_spec(bare(enable_lmk_q_proj=True, lmk_q_lora_dim=8)))
    assert (lora.lmk_q, lora.lora_rank) == ("lora", 8)


ROTARY = {"apply_hils_rope": True, "adjust_lmk_pos": True, "num_attention_heads": 64}


@pytest.mark.parametrize(
    ("model_type", "hope", "in_range", "plain", "hils", "rounded"),
    [
        ("qwen_hils", False, False, "standard", "standard", False),
        ("qwen_hils", False, True, "in_range", "in_range", False),
        ("qwen_hils", True, True, "in_range", "in_range", True),
        ("qwen_hils", True, False, "hope", "hope", True),
        ("olmo_hils", False, False, "standard", "standard", True),
        ("olmo_hils", False, True, "standard", "standard", True),
        ("olmo_hils", True, True, "standard", "in_range", True),
        ("olmo_hils", True, False, "standard", "hope", True),
    ],
)
def test_rotary_variant_of_each_layer_kind(model_type, hope, in_range, plain, hils, rounded):
    spec = load_spec(bare(model_type, use_hope=hope, enable_inrange_rope=in_range, **ROTARY))
    first, fourth = spec.mixers[0].rotary, spec.mixers[3].rotary
    assert (first.kind, fourth.kind, first.rounded, fourth.rounded) == (
        plain, hils, rounded, rounded,
    )  # fmt: skip
    if in_range and model_type == "olmo_hils" and not hope:
        entry = next(e for e in describe(spec) if e[0] == "enable_inrange_rope")
        assert entry[1] is False and "only with use_hope" in entry[2]


@pytest.mark.parametrize(
    ("head_dim", "theta", "context", "kept"),
    [(64, 1e4, 8192, 23), (64, 1e7, 262144, 20), (128, 5e5, 8192, 32)],
)
def test_pairs_kept_in_the_released_models(head_dim, theta, context, kept):
    assert int((in_range_frequencies(head_dim, theta, context, 2.0) > 0).sum()) == kept


def test_closed_form():
    spec = load_spec(bare(use_hope=True, hope_context_length=512, **ROTARY))
    rotary = spec.mixers[3].rotary
    assert rotary.pairs == 16
    assert rotary.theta == pytest.approx((512 / (2 * math.pi)) ** (16 / 15))
    written = load_spec(bare(use_hope=True, hope_theta=99, hope_partial_ratio=0.001, **ROTARY))
    assert (written.mixers[3].rotary.theta, written.mixers[3].rotary.pairs) == (99.0, 1)
    Rotary(RotarySpec("hope", 64, 1.0, pairs=1))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"use_naive_bsa": True}, "use_naive_bsa"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"head_dim": 64}, "head_dim is 64"),
        ({"num_key_value_heads": 5}, "num_key_value_heads is 5"),
        ({"num_attention_heads": 48, "num_key_value_heads": None}, "num_attention_heads is 48"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "linear"}}, "linear"),
        ({"rope_theta": 1.0, "rope_parameters": {"rope_theta": 2.0}}, "rope_theta is 1.0"),
        ({"chunk_size": 1}, "chunk_size is 1"),
        ({"hils_topk": 0}, "hils_topk is 0"),
        ({"hils_sliding_window": 0}, "hils_sliding_window is 0"),
        ({"hils_sliding_window": -4}, "hils_sliding_window is -4"),
        ({"hils_sliding_window": None}, "hils_sliding_window is None"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window is 0"),
        ({"adjust_lmk_pos": False}, "adjust_lmk_pos is False"),
        ({"shared_q_c": True, "enable_prior_query": False}, "shared_q_c"),
        ({"compressed_lmk_k": True, "enable_prior_query": False}, "compressed_lmk_k"),
        ({"compact_lmk_k": True, "enable_chunk_pooling": True}, "compact_lmk_k"),
        ({"enable_softmax1": None}, "enable_softmax1 is None"),
        ({"enable_softmax1": "true"}, "enable_softmax1 is 'true'"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x'"),
        (
            {"shared_lmk_q_norm": True, "enable_lmk_q_proj": True, "layerwise_lmkq_norm": True},
            "shared_lmk_q_norm",
        ),
    ],
)
def test_refused_in_one_line_with_a_remedy(change, words):
    with pytest.raises(BadModel) as caught:
        load_spec(bare(**change))
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.hint


def test_olmo_refusals():
    with pytest.raises(BadModel, match="landmark is id 151936"):
        load_spec(bare("olmo_hils"))
    with pytest.raises(BadModel, match="layer_types"):
        load_spec(bare("olmo_hils", adjust_lmk_pos=True, layer_types=["full_attention"]))
    with pytest.raises(BadModel, match="'linear_attention'"):
        types = ["linear_attention"] * 32
        load_spec(bare("olmo_hils", adjust_lmk_pos=True, layer_types=types))


def test_unknown_keys_are_logged_and_known_ones_are_not(caplog):
    quiet = bare(
        use_cache=True, auto_insert_lmk=True, use_olmo3_rotary_embedding=True,
        max_window_layers=3, initializer_range=0.1, attention_dropout=0.0, layer_types=None,
        pad_token_id=None, transformers_version="4", hope_theta=None,
    )  # fmt: skip
    with caplog.at_level(logging.WARNING):
        load_spec(quiet)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        load_spec(bare(enable_softmax_1=True))
    assert "enable_softmax_1" in caplog.text and "'enable_softmax1'" in caplog.text


def test_rope_parameters_replace_rope_theta():
    nested = {"rope_type": "default", "rope_theta": 5e5}
    spec = load_spec(bare(rope_parameters=nested))
    assert spec.mixers[0].rotary.theta == 5e5


def test_helpers_of_the_released_small_model():
    """345M: 16 layers, hidden 1024, 16 / 2 heads; a page takes 32 KiB and 2112 bytes per layer."""
    spec = load_spec(
        bare(
            vocab_size=100278,
            hidden_size=1024,
            intermediate_size=4096,
            num_hidden_layers=16,
            num_attention_heads=16,
            num_key_value_heads=2,
            full_attn_interleave=1,
            tie_word_embeddings=True,
            torch_dtype="bfloat16",
            enable_lmk_q_proj=True,
            lmk_q_lora_dim=64,
            hils_topk=32,
        )
    )
    per_token = bytes_per_token(spec, torch.bfloat16)
    assert per_token == pytest.approx(16 * (32768 + 2112) / 63)
    assert 330e6 < parameter_count(spec) < 360e6
    assert not declared(spec)["lm_head.weight"].required
