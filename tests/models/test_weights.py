"""Loading: every tensor is used or reported, corrupted files are errors."""

from __future__ import annotations

import json
import random
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from cairn.distributed.groups import Group
from cairn.errors import BadModel
from cairn.models.registry import load_model, load_spec
from cairn.models.sharding import Share
from tests.specs import declared, parameter_count

TOKENS = torch.arange(75) * 7 % 40


def random_tensors(spec, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, stored in declared(spec).items():
        if stored.required:
            noise = torch.randn(stored.shape, generator=generator)
            tensors[name] = 1 + 0.2 * noise if "norm" in name else 0.3 * noise
    return tensors


@pytest.fixture
def folder(tmp_path, tiny):
    (tmp_path / "config.json").write_text(json.dumps(tiny))
    save_file(random_tensors(load_spec(tiny)), tmp_path / "model.safetensors")
    return tmp_path


def load(folder, dtype="float32"):
    return load_model(folder, load_spec(folder), dtype, "cpu")


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


VARIANTS = {
    "lora": {},
    "full rank, tied": {"lmk_q_lora_dim": 0, "tie_word_embeddings": True},
    "no projection, layerwise": {"enable_lmk_q_proj": False, "layerwise_qk_norm": True},
    "shared query, biases": {"shared_q_c": True, "attention_bias": True},
    "mean": {"enable_chunk_pooling": True, "layerwise_lmkq_norm": True},
    "landmark key": {"enable_prior_query": False},
    "compact": {"compact_lmk_k": True},
    "compressed": {"compressed_lmk_k": True},
    "shared norm": {"shared_lmk_q_norm": True},
    "external": {"enable_external_lmk_embed": True},
    "olmo": {
        "model_type": "olmo_hils", "enable_external_lmk_embed": True, "mask_lmk_token": True,
        "layerwise_qk_norm": True, "layerwise_lmkq_norm": True, "enable_softmax1": False,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "attention_bias": True},
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_tensor_matters(variant, tmp_path, tiny, plain):
    """Changing any tensor of the file changes the logits."""
    (tmp_path / "config.json").write_text(json.dumps(tiny | VARIANTS[variant]))
    tensors = random_tensors(load_spec(tmp_path))
    save_file(tensors, tmp_path / "model.safetensors")
    base, _ = plain(load(tmp_path), TOKENS)
    assert base.isfinite().all() and base.shape == (75, 40)
    for name, tensor in tensors.items():
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1))
        save_file(tensors | {name: tensor + 0.3 * noise}, tmp_path / "model.safetensors")
        changed, _ = plain(load(tmp_path), TOKENS)
        assert (changed - base).abs().max() > 1e-3, name


def test_rows_beyond_the_landmark_do_not_matter(folder, plain):
    base, _ = plain(load(folder), TOKENS)

    def pad(tensors):
        tensors["model.embed_tokens.weight"][41:] = torch.nan
        tensors["lm_head.weight"][40:] = torch.nan

    rewrite(folder, pad)
    assert torch.equal(plain(load(folder), TOKENS)[0], base)

    def landmark(tensors):
        tensors["model.embed_tokens.weight"][40] += 1

    rewrite(folder, landmark)
    changed, _ = plain(load(folder), TOKENS)
    # Tokens before the first landmark do not depend on it.
    assert torch.equal(changed[:7], base[:7]) and not torch.allclose(changed[7:], base[7:])


@pytest.mark.parametrize("drawn", [False, True])
def test_rows_that_nothing_fills_are_zero(folder, drawn):
    seed = 5 if drawn else None
    model = load_model(folder, load_spec(folder), "float32", "cpu", seed)
    for module, rows in ((model.embedding, 41), (model.head, 40)):
        assert module.weight.shape[0] == 64 and not module.weight[rows:].any()
        assert module.weight[:rows].any(dim=1).all()


def test_more_rows_than_the_rule_says_are_trusted(folder, plain):
    base, _ = plain(load(folder), TOKENS)

    def grow(tensors):
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = torch.nn.functional.pad(tensors[name], (0, 0, 0, 32))

    rewrite(folder, grow)
    assert load_spec(folder).embedding_rows == 96
    assert torch.equal(plain(load(folder), TOKENS)[0], base)


def test_too_few_rows_are_refused(folder):
    def shrink(tensors):
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:40].clone()

    rewrite(folder, shrink)
    with pytest.raises(BadModel, match="landmark is id 40"):
        load_spec(folder)


def test_a_stored_head_of_a_tied_model_counts_where_it_differs(folder, tiny, plain, caplog):
    untied, _ = plain(load(folder), TOKENS)
    (folder / "config.json").write_text(json.dumps(tiny | {"tie_word_embeddings": True}))
    with_head, _ = plain(load(folder), TOKENS)
    assert torch.equal(with_head, untied) and "tie_word_embeddings" in caplog.text
    rewrite(folder, lambda tensors: tensors.pop("lm_head.weight"))
    tied, _ = plain(load(folder), TOKENS)
    assert not torch.allclose(tied, untied)
    caplog.clear()

    def copy(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    rewrite(folder, copy)
    assert load_spec(folder).tied and not caplog.text
    assert torch.equal(plain(load(folder), TOKENS)[0], tied)

    def last_row(tensors):
        tensors["lm_head.weight"][39] += 1

    rewrite(folder, last_row)
    assert not torch.equal(plain(load(folder), TOKENS)[0], tied)
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": torch.ones(7, 32)}))
    with pytest.raises(BadModel, match=r"lm_head\.weight is \[7, 32\] and the embedding"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "value", "known"),
    [
        ("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(8), True),
        ("model.rotary_emb.inv_freq", torch.ones(8), True),
        ("model.layers.1.self_attn.rotary_emb.cos_cached", torch.ones(1, 1, 12, 16), True),
        ("model.rotary_pos_emb.inv_freq", torch.ones(8), True),
        ("rope.freqs", torch.ones(8), True),
        ("model.embeddings.position_ids", torch.arange(8)[None], True),
        ("model.layers.0.attn.bias", torch.ones(1, 1, 12, 12, dtype=torch.bool), True),
        ("model.layers.0.attn.masked_bias", torch.tensor(-1e4), True),
        ("model.layers.0.self_attn.rotary_emb.weight", torch.ones(8), False),
        ("model.layers.0.self_attn.bias", torch.ones(32), False),
    ],
)
def test_buffers_of_older_exports_change_nothing(folder, plain, name, value, known):
    before, _ = plain(load(folder), TOKENS)
    rewrite(folder, lambda tensors: tensors.update({name: value}))
    if known:
        assert torch.equal(plain(load(folder), TOKENS)[0], before)
        return
    with pytest.raises(BadModel, match="unexpected"):
        load(folder)


@pytest.mark.parametrize(
    ("ranks", "own", "pieces", "read"),
    [
        (2, (6, 3), (), [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]),
        # Each piece is divided separately.
        (2, (6, 3), (4, 8), [[0, 1, 4, 5, 6, 7], [2, 3, 8, 9, 10, 11]]),
        # With fewer parts than ranks, two ranks read the same part.
        (4, (6, 3), (), [[0, 1, 2, 3, 4, 5]] * 2 + [[6, 7, 8, 9, 10, 11]] * 2),
        (2, (12, 3), (), [[*range(12)]] * 2),
    ],
)
def test_ranks_read_their_parts(ranks, own, pieces, read):
    stored = torch.arange(36).view(12, 3)
    for rank, rows in enumerate(read):
        share = Share.of(stored.shape, own, pieces, Group(rank, ranks))
        assert torch.equal(share.read(stored, ...), stored[rows])


@pytest.mark.parametrize(("own", "ranks"), [((5, 3), 2), ((4, 3), 2), ((3, 3), 2)])
def test_uneven_parts_are_refused(own, ranks):
    with pytest.raises(ValueError, match="cannot be divided"):
        Share.of((12, 3), own, (), Group(0, ranks))


def test_all_mistakes_in_one_error(folder):
    def spoil(tensors):
        del tensors["model.norm.weight"]
        tensors["model.layers.7.extra"] = torch.zeros(3, 2)
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(5, 32)
        tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(32, 24, dtype=torch.int8)

    rewrite(folder, spoil)
    with pytest.raises(BadModel) as caught:
        load(folder)
    for words in (
        "missing: model.norm.weight [32]",
        "unexpected: model.layers.7.extra [3, 2]",
        "misshapen: model.layers.0.mlp.up_proj.weight is [5, 32], not [24, 32]",
        "unsupported dtype: model.layers.0.mlp.down_proj.weight I8",
    ):
        assert words in str(caught.value)


def test_at_most_five_are_named(folder):
    def spoil(tensors):
        for name in [n for n in tensors if ".layers.0." in n]:
            del tensors[name]

    rewrite(folder, spoil)
    with pytest.raises(BadModel, match=r"\(11 in all\)") as caught:
        load(folder)
    assert str(caught.value).count("layers.0.") == 5


def test_damaged_files(folder):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    length = struct.unpack("<Q", whole[:8])[0]
    damaged = {
        "cut": whole[: len(whole) // 2],
        "one byte short": whole[:-1],
        "one byte long": whole + b"\0",
        "cut header": whole[:100],
        "empty": b"",
        "header not JSON": whole[:8] + b"x" * length + whole[8 + length :],
        "header too long": b"\xff" * 8 + whole[8:],
        "a list": struct.pack("<Q", 2) + b"[]",
    }
    for name, content in damaged.items():
        path.write_bytes(content)
        with pytest.raises(BadModel, match="truncated or corrupt"):
            load(folder)
            pytest.fail(name)


def test_offsets_that_disagree_with_shapes(folder):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    length = struct.unpack("<Q", whole[:8])[0]
    header = whole[8 : 8 + length].replace(b"[24,32]", b"[24,31]")
    path.write_bytes(whole[:8] + header + whole[8 + length :])
    with pytest.raises(BadModel, match="wrong number of bytes"):
        load(folder)


def in_shards(folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    random.Random(0).shuffle(names)
    index = {}
    for i in range(3):
        file = f"model-{i + 1:05}-of-00003.safetensors"
        save_file({name: tensors[name] for name in names[i::3]}, folder / file)
        index |= {name: file for name in names[i::3]}
    write_index(folder, index)
    return index


def write_index(folder, index):
    content = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(content)


def test_shards_equal_one_file(folder, plain):
    base, _ = plain(load(folder), TOKENS)
    in_shards(folder)
    assert torch.equal(plain(load(folder), TOKENS)[0], base)


def test_a_single_file_goes_before_a_stale_index(folder, plain):
    base, _ = plain(load(folder), TOKENS)
    write_index(folder, {"model.norm.weight": "model-00001-of-00009.safetensors"})
    assert torch.equal(plain(load(folder), TOKENS)[0], base)


def test_wrong_index(folder):
    index = in_shards(folder)
    name = "model.norm.weight"
    other = next(file for file in index.values() if file != index[name])
    write_index(folder, index | {name: other})
    with pytest.raises(BadModel, match=r"disagrees.*model\.norm\.weight"):
        load(folder)
    write_index(folder, {n: f for n, f in index.items() if n != name})
    with pytest.raises(BadModel, match=r"model\.norm\.weight \(index: absent"):
        load(folder)
    write_index(folder, index | {"model.more": other})
    with pytest.raises(BadModel, match=r"model\.more .*nowhere"):
        load(folder)
    for file in ("absent.safetensors", "../outside.safetensors"):
        write_index(folder, index | {name: file})
        with pytest.raises(BadModel, match="not in the folder"):
            load(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(BadModel, match="corrupt"):
        load(folder)


def test_pickled_weights_are_never_opened(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04not a pickle")
    with pytest.raises(BadModel, match=r"pickled weights \(pytorch_model\.bin\)"):
        load(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(BadModel, match="no weights"):
        load(folder)


def test_dtype_is_converted(folder, plain):
    base, _ = plain(load(folder), TOKENS)
    half = load(folder, "bfloat16")
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    logits, _ = plain(half, TOKENS)
    assert logits.dtype == torch.float32
    assert (logits - base).abs().mean() < 0.1 * base.std()
    rewrite(folder, lambda tensors: tensors.update({n: t.half() for n, t in tensors.items()}))
    assert load_spec(folder).dtype == "float32"
    close, _ = plain(load(folder), TOKENS)
    assert (close - base).abs().mean() < 0.02 * base.std()


def test_parameter_count_is_what_the_file_holds(folder):
    stored = sum(t.numel() for t in load_file(folder / "model.safetensors").values())
    assert parameter_count(load_spec(folder)) == stored
