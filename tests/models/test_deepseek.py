"""DeepSeek-V3.2 and GLM-5: config.json to a spec, and the tensors that are read."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cairn.errors import BadConfig, BadModel
from cairn.models import weights
from cairn.models.decoder import Decoder
from cairn.models.registry import load_model, load_spec
from cairn.specs.ffn import DenseFfn, MoeFfn
from cairn.specs.mla_options import resolve_mla
from cairn.specs.options import MixerOptions
from tests.specs import declared, parameter_count

GOLDENS = Path(__file__).parents[1] / "data" / "goldens" / "dsa"
YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
BOTH = {"mscale": 1.0, "mscale_all_dim": 1.0}


def v32(**changes):
    return load_spec({"model_type": "deepseek_v32", **changes})


def glm(**changes):
    return load_spec({"model_type": "glm_moe_dsa", **changes})


def selecting(spec) -> str:
    return "".join("S" if mixer.indexer is None else "F" for mixer in spec.mixers)


def test_deepseek_v32_as_published():
    spec = v32(
        rope_theta=10000,
        rope_scaling=YARN | BOTH | {"beta_fast": 32, "beta_slow": 1},
        torch_dtype="bfloat16",
    )
    mixer = spec.mixers[0]
    assert (spec.num_layers, spec.hidden_size, spec.vocab_size) == (61, 7168, 129280)
    assert (mixer.num_heads, mixer.q_lora_rank, mixer.record_dim) == (128, 1536, 576)
    assert mixer.scale == pytest.approx(0.135234, abs=1e-6)
    assert mixer.rotary.attention_factor == 1.0 and mixer.rotary.interleaved
    assert not mixer.indexer.rotary.interleaved
    assert (mixer.indexer.num_heads, mixer.indexer.head_dim, mixer.topk) == (64, 128, 2048)
    assert selecting(spec) == 61 * "F"
    ffns = [layer.ffn for layer in spec.layers]
    assert ffns[:3] == 3 * [DenseFfn(18432)] and {type(ffn) for ffn in ffns[3:]} == {MoeFfn}
    router = ffns[3].router
    assert (ffns[3].experts, ffns[3].active, ffns[3].shared) == (256, 8, 2048)
    assert (router.groups, router.top_groups, router.scale) == (8, 4, 2.5)
    assert 670e9 < parameter_count(spec) < 673e9


def test_glm_5_as_published():
    spec = glm(rope_parameters={"rope_theta": 1000000, "rope_type": "default"})
    mixer = spec.mixers[0]
    assert (mixer.nope_dim, mixer.rope_dim, mixer.value_dim) == (192, 64, 256)
    assert mixer.scale == 0.0625 and mixer.rotary.theta == 1e6
    assert mixer.indexer.rotary.interleaved and spec.norm.eps == 1e-5
    assert mixer.latent_eps == mixer.indexer.eps == 1e-6
    assert selecting(spec) == 78 * "F"


def test_architectures_name_their_model():
    for name, model_type in (
        ("DeepseekV32ForCausalLM", "deepseek_v32"),
        ("GlmMoeDsaForCausalLM", "glm_moe_dsa"),
    ):
        assert load_spec({"architectures": [name]}).architecture == model_type


def sharing(layers: int, **fields) -> str:
    return selecting(glm(num_hidden_layers=layers, **fields))


def test_which_layers_share_a_selection():
    assert sharing(78, index_topk_freq=4, index_skip_topk_offset=3) == ("FFF" + 19 * "SSSF")[:78]
    assert sharing(9, index_topk_freq=4) == "FFSSSFSSS"
    assert sharing(4, index_topk_freq=2, index_skip_topk_offset=2) == "FFSF"
    assert sharing(4, index_topk_freq=None, index_skip_topk_offset=None) == "FFFF"
    assert sharing(3, index_topk_pattern="FSF", index_topk_freq=9) == "FSF"
    assert sharing(3, index_topk_pattern=["full", "shared", "full"]) == "FSF"
    types = ["full", "shared", "shared"]
    assert sharing(3, indexer_types=types, index_topk_pattern="FSF") == "FSS"
    # The draft layer may have an entry.
    assert sharing(3, indexer_types=[*types, "full"]) == "FSS"
    assert selecting(v32(num_hidden_layers=3, index_topk_freq=4)) == "FFF"


def test_layers_that_share_have_no_indexer_weights():
    names = declared(glm(num_hidden_layers=3, first_k_dense_replace=3, index_topk_pattern="FSF"))
    own = {name.split(".")[2] for name in names if ".indexer." in name}
    assert own == {"0", "2"}


def test_feed_forward_parts():
    types = ["dense", "sparse", "dense"]
    spec = glm(num_hidden_layers=3, mlp_layer_types=types, first_k_dense_replace=3)
    assert [type(layer.ffn) for layer in spec.layers] == [DenseFfn, MoeFfn, DenseFfn]
    (moe,) = {layer.ffn for layer in v32(num_hidden_layers=1, first_k_dense_replace=0).layers}
    assert moe.router.renormalize
    (moe,) = {
        layer.ffn
        for layer in v32(
            num_hidden_layers=1, first_k_dense_replace=0, n_shared_experts=2, norm_topk_prob=False
        ).layers
    }
    assert moe.shared == 4096 and not moe.router.renormalize


def test_biases_are_of_the_latents_and_of_the_output():
    names = declared(v32(num_hidden_layers=1, first_k_dense_replace=1, attention_bias=True))
    biases = {name.split("self_attn.")[1] for name in names if name.endswith(".bias")}
    latents = {"q_a_proj.bias", "kv_a_proj_with_mqa.bias"}
    assert biases == {*latents, "o_proj.bias", "indexer.k_norm.bias"}


@pytest.mark.parametrize(
    ("more", "factor", "m"),
    [
        ({}, 0.1 * math.log(40) + 1, 1.0),
        (BOTH, 1.0, 0.1 * math.log(40) + 1),
        ({"mscale": 0.5, "mscale_all_dim": 1}, (0.05 * math.log(40) + 1) / 1.368888, 1.368888),
        ({"mscale": 1, "mscale_all_dim": 0}, 0.1 * math.log(40) + 1, 1.0),
        (BOTH | {"attention_factor": 0.7}, 0.7, 0.1 * math.log(40) + 1),
    ],
)
def test_yarn_scales(more, factor, m):
    mixer = v32(rope_scaling=YARN | more).mixers[0]
    assert mixer.rotary.attention_factor == pytest.approx(factor, rel=1e-5)
    assert mixer.scale == pytest.approx(192**-0.5 * m**2, rel=1e-5)
    assert mixer.indexer.rotary.attention_factor == mixer.rotary.attention_factor


def test_spellings_of_rope():
    old = v32(rope_theta=7000, rope_scaling=YARN | BOTH).mixers[0].rotary
    nested = {"rope_theta": 7000, "rope_type": "yarn"} | {k: YARN[k] for k in list(YARN)[1:]}
    assert v32(rope_parameters=nested | BOTH).mixers[0].rotary == old
    free = v32(max_position_embeddings=8192, rope_scaling=YARN | {"factor": None})
    assert free.mixers[0].rotary.scaling.factor == 2.0
    assert v32(rope_scaling=None, rope_theta=5e5).mixers[0].rotary.kind == "standard"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q_lora_rank": None}, "q_lora_rank is None"),
        ({"qk_rope_head_dim": 0}, "qk_rope_head_dim is 0"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim is 63"),
        ({"head_dim": 128}, "head_dim is 128"),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8"),
        ({"index_head_dim": 32}, "index_head_dim is 32"),
        ({"index_topk": 5000}, "index_topk is 5000"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "'linear'"),
        ({"rope_scaling": YARN | {"factor": -1}}, "rope_scaling.factor is -1"),
        ({"rope_theta": 5.0, "rope_parameters": {"rope_theta": 6.0}}, "rope_parameters says"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ({"n_group": 7}, "n_group is 7"),
        ({"topk_group": 9}, "topk_group is 9"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok is 129"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config.bits is None"),
        ({"quantization_config": {"quant_method": "hqq"}}, "'hqq': weights of HQQ are in its own"),
        (
            {
                "quantization_config": {
                    "quant_method": "fp8",
                    "activation_scheme": "static",
                    "weight_block_size": [128, 128],
                }
            },
            "activation_scheme is 'static'",
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}},
            "weight_block_size is .128.: not two positive integers",
        ),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_refusals(change, words):
    with pytest.raises(BadModel, match=words):
        v32(**change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"indexer_types": ["shared", "full"]}, "layer 0"),
        ({"indexer_types": ["full"]}, "indexer_types"),
        ({"indexer_types": ["full", "half"]}, "'half'"),
        ({"index_topk_pattern": "FX"}, "'X'"),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 0}, "layer 0"),
    ],
)
def test_refused_sharing(change, words):
    with pytest.raises(BadModel, match=words):
        glm(num_hidden_layers=2, **change)


def test_an_indexer_runs_on_a_second_stream_where_asked_to():
    options = MixerOptions(indexer_stream="second")
    changed = resolve_mla(glm(num_hidden_layers=4, indexer_types=["full", "shared"] * 2), options)
    indexers = [mixer.indexer for mixer in changed.mixers]
    assert [own is not None and own.second_stream for own in indexers] == [True, False] * 2
    with pytest.raises(BadConfig, match="indexer_stream is 'second', but no layer of latent"):
        resolve_mla(load_spec(GOLDENS.parent / "hils" / "qwen_c64"), options)


def test_a_type_with_the_same_fields_is_refused():
    with pytest.raises(BadModel, match="glm5_next.*linear-attention"):
        load_spec({"model_type": "glm5_next"})


def copied(case: str, folder: Path, change=lambda tensors: tensors) -> Path:
    """A golden model with other tensors."""
    (folder / "config.json").write_text((GOLDENS / case / "config.json").read_text())
    save_file(change(load_file(GOLDENS / case / "model.safetensors")), folder / "model.safetensors")
    return folder


def load(folder: Path):
    return load_model(folder, load_spec(folder), "float32", "cpu")


def test_fp8_projection_of_latents_is_dequantised_once(tmp_path):
    case = GOLDENS / "v32_fp8_scale_ue8m0"
    stored = load_file(case / "model.safetensors")
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    scale = stored[f"{name}_scale_inv"].float()
    rows, columns = stored[name].shape
    by_element = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    kept = load(case).layers[1].mixer.kv_up.weight
    assert kept.dtype == torch.float32
    assert torch.equal(kept, stored[name].float() * by_element)

    # The scales may be in another file.
    index = {key: f"{'b' if key.endswith('scale_inv') else 'a'}.safetensors" for key in stored}
    for file in set(index.values()):
        save_file({k: stored[k] for k in stored if index[k] == file}, tmp_path / file)
    text = json.dumps({"weight_map": index})
    (tmp_path / "model.safetensors.index.json").write_text(text)
    (tmp_path / "config.json").write_text((case / "config.json").read_text())
    assert torch.equal(load(tmp_path).layers[1].mixer.kv_up.weight, kept)


def test_scales_are_read_in_each_of_their_dtypes(tmp_path):
    case = "v32_fp8_scale_ue8m0"
    kept = load(GOLDENS / case).layers[1].mixer.kv_up.weight

    def stored_as(change):
        return lambda t: {k: change(v) if k.endswith("scale_inv") else v for k, v in t.items()}

    for change in (lambda v: v.float(), lambda v: v.view(torch.uint8)):
        folder = copied(case, tmp_path, stored_as(change))
        assert torch.equal(load(folder).layers[1].mixer.kv_up.weight, kept)


def test_a_scale_that_is_missing_or_misshapen(tmp_path):
    name = "model.layers.0.self_attn.kv_b_proj.weight_scale_inv"
    case = "v32_fp8_scale_ue8m0"
    folder = copied(case, tmp_path, lambda t: {k: v for k, v in t.items() if k != name})
    with pytest.raises(BadModel, match=rf"missing: {name}"):
        load(folder)
    copied(case, tmp_path, lambda t: t | {name: torch.ones(3, 1)})
    with pytest.raises(BadModel, match=rf"misshapen: {name}"):
        load(folder)
    not_finite = torch.full((1, 1), 255, dtype=torch.uint8)
    for values in (lambda x: -x.float(), lambda x: not_finite.expand(x.shape).contiguous()):
        copied(case, tmp_path, lambda t, values=values: t | {name: values(t[name])})
        with pytest.raises(BadModel, match=f"{name} holds a scale that is NaN, infinite or neg"):
            load(folder)


def fill_memory(monkeypatch):
    """Parameters are filled with bytes of 255 before loading: NaN, also in e8m0."""
    empty = torch.nn.Module.to_empty

    def filled(module, **where):
        for parameter in empty(module, **where).parameters():
            parameter.view(torch.uint8).fill_(255)
        return module

    monkeypatch.setattr(torch.nn.Module, "to_empty", filled)


def test_a_scale_that_nothing_fills_is_named_and_is_zero(monkeypatch):
    case, every = GOLDENS / "v32_fp8_scale_ue8m0", Decoder.weights

    def incomplete(model, stored=None):
        left_out = "layers.1.self_attn.o_proj.weight_scale_inv"
        return [one for one in every(model, stored) if not one.source.endswith(left_out)]

    monkeypatch.setattr(Decoder, "weights", incomplete)
    fill_memory(monkeypatch)
    with pytest.raises(BadModel, match="unexpected: model.layers.1.self_attn.o_proj.weight_scale"):
        load(case)
    monkeypatch.setattr(weights, "account", lambda *given: None)
    with pytest.raises(AssertionError, match="0 of the 2 numbers of layers.1.mixer.out.scale"):
        load(case)
    monkeypatch.setattr(weights, "_check_filled", lambda *given: None)
    assert not load(case).layers[1].mixer.out.scale.any()


@pytest.mark.parametrize("case", ["v32_fp8_scale_ue8m0", "glm_freq4_offset3"])
def test_every_number_of_a_model_is_read_from_its_files(case, monkeypatch):
    """Uninitialised memory that contains NaN and 255 gives the same model: loading overwrites all
    scales and parameters."""
    wanted = load(GOLDENS / case)
    fill_memory(monkeypatch)
    found = dict(load(GOLDENS / case).named_parameters())
    for name, parameter in wanted.named_parameters():
        assert torch.equal(found[name].view(torch.uint8), parameter.view(torch.uint8)), name


def test_draft_layers_are_skipped_and_nothing_else(tmp_path):
    def with_more(name):
        return lambda tensors: tensors | {name: torch.zeros(2, 2)}

    case = "glm_freq4_offset3"
    assert any(".layers.8." in name for name in load_file(GOLDENS / case / "model.safetensors"))
    load(copied(case, tmp_path, with_more("model.layers.8.eh_proj.weight")))
    for name in ("model.layers.9.eh_proj.weight", "model.layers.3.self_attn.indexer.wk.weight"):
        with pytest.raises(BadModel, match=f"unexpected: {name}"):
            load(copied(case, tmp_path, with_more(name)))


def fused(tensors):
    """The same checkpoint with one tensor for all experts of a layer, and one for their scales."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    layers = {name.partition("experts.")[0] for name in tensors if ".experts." in name}
    kinds = {"weight": "", "weight_scale_inv": "_scale_inv"}
    maps = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
    for layer, end, name in itertools.product(layers, kinds, maps):
        of_map = [
            [tensors[f"{layer}experts.{e}.{one}.{end}"] for one in maps[name]] for e in range(4)
        ]
        stacked = torch.stack([torch.cat([x.view(torch.uint8) for x in own]) for own in of_map])
        found[f"{layer}experts.{name}{kinds[end]}"] = stacked.view(of_map[0][0].dtype)
    return found


def test_experts_in_8_bits_are_read_in_both_layouts(tmp_path):
    case = "v32_fp8_scale_ue8m0"
    wanted = dict(load(GOLDENS / case).named_parameters())
    found = dict(load(copied(case, tmp_path, fused)).named_parameters())
    experts = [name for name in wanted if ".gate_up." in name or ".ffn.down." in name]
    assert any(name.endswith("gate_up.scale") for name in experts)
    for name in experts:
        assert torch.equal(found[name].view(torch.uint8), wanted[name].view(torch.uint8)), name

    def without(end):
        return lambda t: {k: v for k, v in fused(t).items() if not k.endswith(end)}

    for end in ("gate_up_proj_scale_inv", "down_proj"):
        with pytest.raises(BadModel, match=rf"missing: .*experts\.{end}"):
            load(copied(case, tmp_path, without(end)))
