"""Effects of sampling parameters, and log-probabilities, with the LLM class."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from cairn import LLM, SamplingParams
from tests.llm.test_generate import ids

VOCAB = 256


def sample(llm, prompts, **params):
    given = {"max_tokens": 8, "ignore_eos": True, **params}
    listed = [{"prompt_token_ids": p} for p in prompts]
    return llm.generate(listed, SamplingParams(**given), use_tqdm=False)


def first(llm, prompt, **params):
    return sample(llm, [prompt], **params)[0].outputs[0]


def line(entry) -> np.ndarray:
    """A whole-vocabulary entry as an array [V]."""
    assert set(entry) == set(range(VOCAB))
    return np.array([entry[token].logprob for token in range(VOCAB)])


def golden(folder, length: int):
    vectors = load_file(folder / "vectors.safetensors")
    prefix = f"n{length}."
    return {k.removeprefix(prefix): v for k, v in vectors.items() if k.startswith(prefix)}


def test_logprobs_are_over_the_user_vocabulary(token_llm, token_folder):
    """Entries equal the log-softmax of the reference's user logits, whose probabilities sum to
    one."""
    want = golden(token_folder, 53)
    prompt = want["input_ids"].tolist()
    params = {"temperature": 0, "logprobs": -1, "prompt_logprobs": -1}
    (result,) = sample(token_llm, [prompt], max_tokens=20, **params)
    assert result.prompt_logprobs[0] is None
    got = np.array([line(entry) for entry in result.prompt_logprobs[1:]])
    reference = torch.log_softmax(want["prefill_logits"], -1).numpy()
    np.testing.assert_allclose(got, reference[:-1], atol=1e-3)
    np.testing.assert_allclose(np.exp(got).sum(-1), 1.0, atol=1e-4)
    output = result.outputs[0]
    decode = torch.log_softmax(want["decode_logits"], -1).numpy()[:20]
    np.testing.assert_allclose([line(e) for e in output.logprobs], decode, atol=1e-3)
    assert output.token_ids == want["greedy_ids"][:20].tolist()
    assert output.cumulative_logprob == pytest.approx(decode.max(-1).sum(), abs=1e-2)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_a_few_alternatives(token_llm, count):
    prompt = ids(1, 30)
    full = sample(token_llm, [prompt], seed=4, logprobs=-1, prompt_logprobs=-1)[0]
    some = sample(token_llm, [prompt], seed=4, logprobs=count, prompt_logprobs=count)[0]
    tokens = full.outputs[0].token_ids
    assert some.outputs[0].token_ids == tokens
    pairs = [
        *zip(tokens, some.outputs[0].logprobs, full.outputs[0].logprobs, strict=True),
        *zip(prompt[1:], some.prompt_logprobs[1:], full.prompt_logprobs[1:], strict=True),
    ]
    for token, few, every in pairs:
        want = line(every)
        top = np.argsort(-want)[:count].tolist()
        assert set(few) == {*top, token}
        assert list(few)[:count] == top
        for other in few:
            assert few[other].logprob == pytest.approx(want[other], abs=1e-4)
            assert few[other].rank == int((want > want[other]).sum()) + 1
            assert few[other].decoded_token is None


def test_alternatives_are_decoded(llm):
    (result,) = llm.generate("import ", SamplingParams(temperature=0, max_tokens=1, logprobs=2))
    (entry,) = result.outputs[0].logprobs
    assert [entry[token].decoded_token for token in entry] == [chr(token) for token in entry]


@pytest.fixture
def loud_padding(tmp_path, token_folder):
    """The head's rows of landmark and padding are far larger than the user's, in an untied
    model."""
    config = (token_folder / "config.json").read_text()
    at = tmp_path / "loud"
    at.mkdir()
    (at / "config.json").write_text(
        config.replace('"tie_word_embeddings": true', '"tie_word_embeddings": false')
    )
    tensors = load_file(token_folder / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    assert head.shape[0] == VOCAB + 32
    head[VOCAB:] = 100 * head[:32]
    save_file({**tensors, "lm_head.weight": head}, at / "model.safetensors")
    return at


def test_landmark_and_padding_never_appear(token_folder, loud_padding):
    params = {"temperature": 0, "logprobs": -1, "max_tokens": 40}
    plain = first(LLM(token_folder, kv_cache_memory="1MiB"), ids(2, 40), **params)
    llm = LLM(loud_padding, kv_cache_memory="1MiB")
    loud = first(llm, ids(2, 40), **params)
    assert loud.token_ids == plain.token_ids
    for a, b in zip(loud.logprobs, plain.logprobs, strict=True):
        np.testing.assert_allclose(line(a), line(b), atol=1e-4)
    hot = sample(llm, [ids(i, 9) for i in range(30)], temperature=50.0, max_tokens=30)
    assert max(max(result.outputs[0].token_ids) for result in hot) < VOCAB


def test_logprobs_are_those_of_the_model_whatever_is_adjusted(token_llm):
    """As in vLLM: before bias, penalties and temperature."""
    prompt = ids(3, 20)
    plain = first(token_llm, prompt, max_tokens=1, temperature=0, logprobs=-1)
    for change in (
        {"logit_bias": {7: 50.0}},
        {"temperature": 9.0, "seed": 1},
        {"top_k": 2, "seed": 1},
        {"repetition_penalty": 3.0, "temperature": 0},
    ):
        other = first(token_llm, prompt, max_tokens=1, logprobs=-1, **change)
        np.testing.assert_allclose(line(other.logprobs[0]), line(plain.logprobs[0]), atol=1e-5)


def test_logit_bias(token_llm):
    assert first(token_llm, ids(3, 20), logit_bias={9: 100.0}).token_ids == [9] * 8
    free = first(token_llm, ids(3, 20), temperature=0)
    banned = dict.fromkeys(free.token_ids, -100.0)
    other = first(token_llm, ids(3, 20), temperature=0, logit_bias=banned)
    assert not set(other.token_ids) & set(banned)


def test_presence_and_frequency_penalties(token_llm):
    """With the largest penalty on a flat distribution, no token repeats for a long time."""
    flat = {"temperature": 0, "max_tokens": 40}
    repeated = first(token_llm, ids(3, 20), logit_bias={5: 100.0}, **flat)
    assert set(repeated.token_ids) == {5}
    lifted = dict.fromkeys(range(100, 140), 30.0)
    once = first(
        token_llm,
        ids(3, 20),
        logit_bias=lifted,
        presence_penalty=2.0,
        frequency_penalty=2.0,
        **flat,
    )
    plain = first(token_llm, ids(3, 20), logit_bias=lifted, **flat)
    assert max(np.bincount(once.token_ids)) < max(np.bincount(plain.token_ids))


def test_penalties_follow_the_formula(token_llm):
    """Each greedy token, recomputed from the reported log-probabilities of the same step."""
    prompt, params = (
        ids(3, 20),
        {"presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.4},
    )
    output = first(token_llm, prompt, temperature=0, max_tokens=30, logprobs=-1, **params)
    counts = np.zeros(VOCAB)
    for token, entry in zip(output.token_ids, output.logprobs, strict=True):
        # The repetition penalty divides logits, which log-probabilities give up to a constant: skip
        # close ones.
        logprobs = line(entry)
        shifted = logprobs - params["presence_penalty"] * (counts > 0)
        shifted -= params["frequency_penalty"] * counts
        fresh = np.array([t not in prompt and counts[t] == 0 for t in range(VOCAB)])
        best_fresh = int(np.argmax(np.where(fresh, shifted, -np.inf)))
        assert token == best_fresh or not fresh[token]
        counts[token] += 1
    assert len(set(output.token_ids)) > 20


def test_min_tokens_holds_back_the_end(token_llm):
    prompt = ids(4, 12)
    bias = {1: 100.0}
    short = first(token_llm, prompt, temperature=0, ignore_eos=False, logit_bias=bias)
    assert short.token_ids == [1]
    held = first(token_llm, prompt, temperature=0, ignore_eos=False, logit_bias=bias, min_tokens=4)
    assert len(held.token_ids) == 5
    assert held.token_ids[-1] == 1
    assert 1 not in held.token_ids[:4]
    stop = {"temperature": 0, "stop_token_ids": [9], "logit_bias": {9: 100.0}}
    assert len(first(token_llm, prompt, min_tokens=3, **stop).token_ids) == 4


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=str)
def test_the_narrowest_filter_is_greedy(token_llm, narrow):
    prompts = [ids(i, 10 + i) for i in range(6)]
    greedy = [r.outputs[0].token_ids for r in sample(token_llm, prompts, temperature=0)]
    drawn = [r.outputs[0].token_ids for r in sample(token_llm, prompts, temperature=3.0, **narrow)]
    assert drawn == greedy


def test_greedy_and_drawn_rows_share_a_batch(token_llm):
    prompts = [{"prompt_token_ids": ids(i, 20)} for i in range(4)]
    params = [
        SamplingParams(temperature=0, max_tokens=9, ignore_eos=True),
        SamplingParams(seed=1, max_tokens=9, ignore_eos=True),
        SamplingParams(seed=2, top_k=2**70, max_tokens=9, ignore_eos=True),
        SamplingParams(seed=2, top_k=7, top_p=0.9, min_p=0.01, max_tokens=9, ignore_eos=True),
    ]
    together = token_llm.generate(prompts, params)
    for prompt, param, got in zip(prompts, params, together, strict=True):
        (alone,) = token_llm.generate(prompt, param)
        assert got.outputs[0].token_ids == alone.outputs[0].token_ids


def test_a_seed_draws_the_same_in_any_schedule(token_llm, token_folder):
    """In a batch, alone, in chunks, with a warm cache, and with preemptions."""
    prompts = [ids(40 + i, 60) for i in range(5)]
    params = {"seed": 11, "max_tokens": 40, "frequency_penalty": 0.5}
    want = [first(token_llm, prompt, **params).token_ids for prompt in prompts]
    chunked = LLM(token_folder, kv_cache_memory="1MiB", chunked_prefill_size=7)
    assert [r.outputs[0].token_ids for r in sample(chunked, prompts, **params)] == want
    assert [r.outputs[0].token_ids for r in sample(token_llm, prompts, **params)] == want
    tight = LLM(token_folder, kv_cache_memory=12000 * 17, max_model_len=120)
    assert [r.outputs[0].token_ids for r in sample(tight, prompts, **params)] == want
    assert tight.stats().preemptions > 0


@pytest.mark.parametrize(
    "extreme",
    [
        {"temperature": 1e-300},
        {"temperature": 1e300, "min_tokens": 2, "stop_token_ids": [5]},
        {"temperature": 1e-45, "logit_bias": {3: -100.0}},
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 1e300},
        {"top_p": 1e-300},
        {"seed": 2**64 - 1, "n": 2},
        {"seed": -(2**63)},
        {"max_tokens": 10**30, "stop_token_ids": range(VOCAB)},
    ],
    ids=str,
)
def test_extreme_values_still_draw_tokens(token_llm, extreme):
    output = first(token_llm, ids(6, 30), **extreme)
    assert all(0 <= token < VOCAB for token in output.token_ids)
    assert output.finish_reason in ("length", "stop")


@pytest.mark.parametrize("temperature", [pytest.param(1.0, marks=pytest.mark.slow), 2.5])
def test_draws_follow_the_distribution(token_llm, temperature):
    """Chi-square test of 600 samples of one token against softmax(logits / temperature)."""
    prompt = ids(8, 12)
    entry = first(token_llm, prompt, max_tokens=1, temperature=0, logprobs=-1).logprobs[0]
    expected = torch.softmax(torch.tensor(line(entry)) / temperature, -1).numpy()
    draws = 600
    (result,) = sample(token_llm, [prompt], n=draws, seed=1, max_tokens=1, temperature=temperature)
    counts = np.bincount([o.token_ids[0] for o in result.outputs], minlength=VOCAB)
    common = expected * draws >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum()) * draws
    chi_square = ((observed - wanted) ** 2 / wanted).sum()
    degrees = len(wanted) - 1
    # Four standard deviations of the chi-square distribution.
    assert chi_square < degrees + 4 * (2 * degrees) ** 0.5


def test_filters_cut_what_they_say(token_llm):
    prompt = ids(8, 12)
    entry = first(token_llm, prompt, max_tokens=1, temperature=0, logprobs=-1).logprobs[0]
    probs = np.exp(line(entry))
    order = np.argsort(-probs)
    nucleus = order[: int(np.searchsorted(np.cumsum(probs[order]), 0.6)) + 1]
    for params, allowed in (
        ({"top_k": 5}, order[:5]),
        ({"top_p": 0.6}, nucleus),
        ({"min_p": 0.3}, np.flatnonzero(probs >= 0.3 * probs.max())),
    ):
        (result,) = sample(token_llm, [prompt], n=300, seed=1, max_tokens=1, **params)
        drawn = {o.token_ids[0] for o in result.outputs}
        assert drawn <= set(allowed.tolist())
        assert len(drawn) > len(allowed) // 2


def test_an_end_of_sequence_id_outside_the_vocabulary_is_harmless(tmp_path, token_folder):
    shutil.copytree(token_folder, tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    path.write_text(path.read_text().replace('"eos_token_id": 1', '"eos_token_id": 999'))
    output = first(LLM(tmp_path / "m"), ids(1, 9), ignore_eos=False, min_tokens=3, max_tokens=4)
    assert len(output.token_ids) == 4
