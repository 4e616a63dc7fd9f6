"""The older schema: renamed keys, keys without effect, errors."""

from __future__ import annotations

import pytest

from cairn.errors import BadModel
from cairn.models.registry import load_spec
from tests.specs import hils_of, kinds


def older(**more):
    return {
        "model_type": "qwen_lhsa", "architectures": ["HSAForCausalLM"], "hsa_heads": 32,
        "hsa_qk_ratio": 8, "num_key_value_heads": 4, "hsa_sliding_window": 512, "hsa_topk": 32,
        **more,
    }  # fmt: skip


def test_renamed_keys():
    spec = load_spec(older(apply_hsa_rope=True))
    assert spec.architecture == "qwen_hils"
    assert (hils_of(spec).topk, hils_of(spec).window) == (32, 512)
    assert spec.mixers[3].rotary is not None
    # Absent keys have the defaults of the released schema.
    assert hils_of(spec).softmax1 and hils_of(spec).bias_by_entropy and hils_of(spec).lmk_q is None
    olmo = older(
        model_type="olmo_lhsa", adjust_lmk_pos=True, replace_full_attention_with_lhsa=False
    )
    assert load_spec(olmo).architecture == "olmo_hils" and hils_of(load_spec(olmo)) is None


def test_accepted_without_effect(caplog):
    plain = load_spec(older())
    extra = older(
        headwise_topk_softmax=True, groupwise_topk=False, hsa_mode="sparse", base_model="x",
        decoder_variant="y", hsa_dropout_prob=0.1, hsa_disturb_prob=0.1, gumbel_tau=1.0,
        use_gumbel_topk=True, retrieval_head_num=4, unified_retrieval=False, retrieval_dim=None,
        enable_gate=False, nope_retrieval=False, intra_chunk_rope=False, hsa_visible_window=-1,
        enable_hsa_swa=True,
    )  # fmt: skip
    assert load_spec(extra) == plain
    assert not caplog.records


@pytest.mark.parametrize(
    "key",
    [
        {"groupwise_topk": True},
        {"unified_retrieval": True},
        {"retrieval_dim": 64},
        {"enable_gate": True},
        {"nope_retrieval": True},
        {"intra_chunk_rope": True},
        {"hsa_visible_window": 4},
        {"enable_hsa_swa": False},
        {"hsa_mode": "dense"},
        {"hsa_heads": 8},
        {"hsa_heads": 8, "flash_hsa_innerx": True},
        {"hsa_qk_ratio": 4},
    ],
)
def test_other_models_are_refused_by_name(key):
    with pytest.raises(BadModel, match=next(iter(key))):
        load_spec(older(**key))


def test_absent_head_counts_meant_a_quarter_and_four():
    config = older()
    del config["hsa_heads"]
    with pytest.raises(BadModel, match="hsa_heads is 8"):
        load_spec(config)
    config = older()
    del config["hsa_qk_ratio"]
    with pytest.raises(BadModel, match="hsa_qk_ratio is 4"):
        load_spec(config)
    assert load_spec(config | {"num_key_value_heads": 8}).mixers[0].num_kv_heads == 8


def test_contradicting_names_are_refused():
    assert hils_of(load_spec(older(hils_topk=32))).topk == 32
    with pytest.raises(BadModel, match="hsa_topk is 32"):
        load_spec(older(hils_topk=16))


def test_window_pairs():
    config = older()
    del config["hsa_sliding_window"]
    merging = {"use_sliding_window_merging": True, "sliding_window_merging_size": 256}
    assert hils_of(load_spec(config | merging)).window == 256
    assert hils_of(load_spec(older(**merging))).window == 512
    pair = {"use_sliding_window_attention": True, "sliding_window_attention_size": 128}
    spec = load_spec(config | pair | {"use_sliding_window": False, "sliding_window": 4096})
    assert spec.mixers[0].window == 128 and hils_of(spec).window == 128
    off = {"use_sliding_window_attention": False, "sliding_window_attention_size": 128}
    assert kinds(load_spec(older(**off)))[0] == "full"
    with pytest.raises(BadModel, match="sliding_window_attention_size is 128"):
        load_spec(config | pair | {"use_sliding_window": True, "sliding_window": 4096})
    with pytest.raises(BadModel, match="use_sliding_window_attention"):
        load_spec(older(use_sliding_window_attention=True))


def test_shared_norm_has_no_tensor(drawn, tiny):
    model = drawn(tiny | {"shared_lmk_q_norm": True})
    assert model.layers[1].mixer.lmk_q_norm is None
    assert drawn(tiny).layers[1].mixer.lmk_q_norm is not None
