"""DeepSeek-V4 through the whole engine, compared with its formulas, and the content of its
cache."""

from __future__ import annotations

import numpy as np
import pytest

from cairn.errors import BadConfig, BadModel
from tests.engine.dsv4 import (
    CONFIG,
    HEAVY,
    IN_BLOCKS,
    QUANTISED,
    SPARSE,
    Reference,
    blocked,
    coded,
    made,
    saved,
    write,
)
from tests.engine.harness import ROUNDING, assert_same, difference, engine, greedy, run, text
from tests.support import shows

BOUND = 1e-4
"""Relative to the largest logit."""
OPTIONS = {"page_size": 16, "kv_cache_memory": "16MiB"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model folder and its logits by the formulas."""
    folder = tmp_path_factory.mktemp("v4")
    return folder, Reference(CONFIG, saved(folder))


@shows("deepseek_v4", "reference logits", "sliding window", "batching")
@pytest.mark.parametrize(
    ("page_size", "lengths"), [(8, (3, 19, 20, 33, 64)), (64, (4, 21, 31, 32, 130))]
)
def test_prefill_and_decode_equal_the_formulas(model, page_size, lengths):
    """Prompt lengths around entries, windows and pages, and long enough that some entries are not
    selected."""
    folder, reference = model
    built = engine(str(folder), **OPTIONS | {"page_size": page_size})
    prompts = [text(n, n, 150) for n in lengths]
    params = greedy(5, prompt_logprobs=True)
    for prompt, got in zip(prompts, run(built, prompts, params, budgets=[97]), strict=True):
        logits = reference.logits([*prompt, *got.tokens[:-1]])
        wanted = logits.log_softmax(-1).numpy()
        bound = BOUND * logits.abs().max().item()
        assert np.abs(got.prompt_logprobs - wanted[: len(prompt) - 1]).max() < bound
        assert np.abs(got.logprobs - wanted[len(prompt) - 1 :]).max() < bound
        assert got.tokens == logits[len(prompt) - 1 :].argmax(-1).tolist()


@shows("deepseek_v4", "chunked prefill")
@pytest.mark.parametrize("chunk", [3, 19, 31, 64])
def test_chunks(model, chunk):
    prompt, params = text(7, 100, 150), greedy(2, prompt_logprobs=True)
    whole, parts = (
        run(engine(str(model[0]), **OPTIONS), [prompt], params, budgets)[0]
        for budgets in ((), [chunk])
    )
    assert_same(whole, parts)


@shows("deepseek_v4", "prefix cache")
@pytest.mark.parametrize("length", [17, 48, 100])
def test_a_cached_prefix_of_any_number_of_pages(model, length):
    """Most of these end within the window of an entry."""
    built = engine(str(model[0]), **OPTIONS)
    prompt = text(9, 100, 150)
    run(built, [prompt[:length]], greedy(1))
    (found,) = run(built, [prompt], greedy(2))
    assert found.cached == (length // 16 * 16 if length < 100 else 96)
    (cold,) = run(engine(str(model[0]), **OPTIONS), [prompt], greedy(2))
    assert_same(found, cold)


@shows("deepseek_v4", "quantised KV")
def test_records_in_bytes(tmp_path):
    """Close to the 32-bit results, and equal in chunks and after a cached prefix."""
    saved(tmp_path, head_dim=80, qk_rope_head_dim=16)
    options = OPTIONS | {"kv_cache_dtype": "fp8_ds"}
    prompt, params = text(9, 100, 150), greedy(2, prompt_logprobs=True)
    built = engine(str(tmp_path), **options)
    pages = built.runner.pools.pages
    # 64 values in float8, 8 bytes of scales, 16 values in bfloat16.
    assert [pages[1][name].shape[2] for name in ("record", "entry")] == [104, 104]
    (whole,) = run(built, [prompt], params)
    (parts,) = run(engine(str(tmp_path), **options), [prompt], params, [33])
    assert_same(whole, parts)
    (found,) = run(built, [prompt], greedy(2))
    assert found.cached == 96
    assert difference(found.logprobs, whole.logprobs) < ROUNDING
    (plain,) = run(engine(str(tmp_path), **OPTIONS), [prompt], params)
    error = np.abs(whole.prompt_logprobs - plain.prompt_logprobs)
    assert 0 < np.median(error) < 0.1


@shows("deepseek_v4", "speculation")
def test_rejected_guesses_leave_nothing_behind(model):
    """Rejected guesses complete entries that the accepted tokens complete differently."""
    options = OPTIONS | {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 6}
    prompt = text(3, 30, 150) * 2
    plain = run(engine(str(model[0]), **OPTIONS), [prompt], greedy(16))[0]
    guessed = run(engine(str(model[0]), **options), [prompt], greedy(16))[0]
    assert_same(guessed, plain)


def test_cache_fields_of_layers(tmp_path):
    """Entries and index keys are kept for good; records and inputs of entries only under their
    windows."""
    schema = made(tmp_path).runner.pools.schema
    pages = [layer.pages for layer in schema.layers]
    kept = [{field.name: (field.shape, field.window) for field in fields} for fields in pages]
    record = {"record": ((16, 32), 20)}
    sparse = {
        "inputs": ((16, 4 * (32 + 16)), 8),
        "entry": ((4, 32), None),
        "index_key": ((4, 16), None),
    }
    heavy = {"inputs": ((16, 2 * 32), 32), "entry": ((1, 32), None)}
    assert kept == [record, record | sparse, record | heavy]
    assert schema.reach == 2


@shows("deepseek_v4", "quantised weights")
def test_quantised_checkpoints_give_the_logits_of_what_they_hold(tmp_path):
    """Matrices in e4m3 blocks, experts in e2m1; scales in e8m0."""
    changes = {"hidden_size": 160, "q_lora_rank": 136, "moe_intermediate_size": 64}
    weights = saved(tmp_path, **changes)
    config = CONFIG | changes
    stored, plain = {}, {}
    for name, tensor in weights.items():
        if ".experts." in name:
            plain[name] = coded(stored, name, tensor)
        elif name.endswith("weight") and any(part in name for part in IN_BLOCKS):
            plain[name] = blocked(stored, name, tensor)
        else:
            stored[name] = plain[name] = tensor
    write(tmp_path, config | QUANTISED, stored)
    prompt = text(5, 70, 150)
    (got,) = run(engine(str(tmp_path), **OPTIONS), [prompt], greedy(4, prompt_logprobs=True))
    logits = Reference(config, plain).logits(prompt)
    error = np.abs(got.prompt_logprobs - logits.log_softmax(-1).numpy()[:-1]).max()
    assert error < BOUND * logits.abs().max().item()
    packed = engine(str(tmp_path), quantization="fp4", **OPTIONS)
    (kept,) = run(packed, [prompt], greedy(4, prompt_logprobs=True))
    assert_same(kept, got)
    experts = packed.runner.model.layers[1].ffn
    # 6 experts of three matrices: 4 bits per value, and 8 for every 32 or fewer values of a row.
    assert experts.gate_up.weight.nbytes + experts.down.weight.nbytes == 6 * 3 * 64 * 160 // 2
    assert experts.gate_up.scale.nbytes + experts.down.scale.nbytes == 6 * (128 * 5 + 160 * 2)
    missing = next(name for name in stored if name.endswith("w1.scale"))
    stored.pop(missing)
    write(tmp_path, config | QUANTISED, stored)
    for quantization in ("auto", "fp4"):
        with pytest.raises(BadModel, match=missing):
            engine(str(tmp_path), quantization=quantization, **OPTIONS)


def test_formats_that_do_not_hold_records_are_refused(model):
    with pytest.raises(BadConfig, match="quantization is fp4, but the checkpoint has no experts"):
        engine(str(model[0]), **OPTIONS | {"quantization": "fp4"})
    for kind, match in (
        ("fp8_e4m3", "fp8_ds, or auto"),
        ("fp8_ds", "an odd number of tiles"),
    ):
        with pytest.raises(BadConfig, match=match):
            engine(str(model[0]), **OPTIONS | {"kv_cache_dtype": kind})


def test_page_sizes_that_windows_do_not_fill_are_refused(model):
    with pytest.raises(BadConfig, match="page_size is 24.*every 32 tokens"):
        engine(str(model[0]), **OPTIONS | {"page_size": 24})


def test_kinds_without_entries_alone(tmp_path):
    """Small compression rates, and a model in which all layers read only a window."""
    changes = {"layer_types": ["sliding_attention"] * 2, "num_hidden_layers": 2}
    reference = Reference(CONFIG | changes, saved(tmp_path, **changes))
    prompt = text(2, 50, 150)
    (got,) = run(engine(str(tmp_path), **OPTIONS), [prompt], greedy(2, prompt_logprobs=True))
    logits = reference.logits(prompt)
    error = np.abs(got.prompt_logprobs - logits.log_softmax(-1).numpy()[:-1]).max()
    assert error < BOUND * logits.abs().max().item()
    assert {SPARSE, HEAVY}.isdisjoint(changes["layer_types"])
