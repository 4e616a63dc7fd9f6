"""The public LLM class: results, their order, prompts, streams, chat, interrupts."""

from __future__ import annotations

import contextlib
import gc
import json
import shutil

import numpy as np
import pytest

from cairn import LLM, BadRequest, SamplingParams
from cairn.errors import TooLong
from tests.llm.conftest import assert_idle

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def ids(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, 250, length).tolist()


def tokens_of(results) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in results]


def test_shape_of_a_result(llm):
    prompt = "def main("
    (result,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=5))
    assert result.prompt == prompt
    assert result.prompt_token_ids == list(prompt.encode())
    assert result.prompt_logprobs is None
    assert result.finished
    (output,) = result.outputs
    assert output.index == 0
    assert len(output.token_ids) == 5
    assert output.text == bytes(output.token_ids).decode()
    assert (output.finish_reason, output.stop_reason) == ("length", None)
    assert (output.logprobs, output.cumulative_logprob) == (None, None)


def test_nothing_but_the_users_list_is_as_long_as_a_prompt_while_steps_run(token_llm, monkeypatch):
    """Python's garbage collector traverses every young list, and a prompt may have a million
    ids."""
    prompt, found, step = ids(11, 777), [], token_llm.engine.core.step

    def watched():
        found.append([o for o in gc.get_objects() if type(o) is list and len(o) >= len(prompt)])
        return step()

    monkeypatch.setattr(token_llm.engine.core, "step", watched)
    (result,) = token_llm.generate({"prompt_token_ids": prompt}, GREEDY)
    as_long = {id(one) for lists in found for one in lists if one[:9] == prompt[:9]}
    assert as_long == {id(prompt)}
    assert result.prompt_token_ids == prompt
    assert result.prompt_token_ids is not prompt


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_pythons_collector_leaves_alone_what_is_old_while_steps_run(token_llm, monkeypatch, error):
    step, before, found = token_llm.engine.core.step, gc.get_threshold(), []

    def watched():
        found.append(gc.get_threshold())
        if error is not None:
            raise error
        return step()

    monkeypatch.setattr(token_llm.engine.core, "step", watched)
    gc.set_threshold(500, 7, 3)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            token_llm.generate({"prompt_token_ids": ids(3, 20)}, GREEDY)
        assert {(young, middle) for young, middle, _ in found} == {(500, 7)}
        assert all(old > 1e9 for *_, old in found)
        assert gc.get_threshold() == (500, 7, 3)
    finally:
        gc.set_threshold(*before)


def test_steps_create_no_reference_cycles(token_llm):
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2, n=2)
    prompts = [{"prompt_token_ids": ids(3, 20)}] * 8
    token_llm.generate(prompts, params)
    gc.collect()
    gc.disable()
    try:
        token_llm.generate(prompts, params)
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_no_prompts_no_results(llm):
    assert llm.generate([]) == []


def test_default_parameters(llm):
    (result,) = llm.generate("import ")
    assert len(result.outputs[0].token_ids) == 16


def test_every_form_of_a_prompt_is_the_same_prompt(llm):
    data = list(b"class Path:")
    forms = [
        "class Path:",
        {"prompt": "class Path:"},
        {"prompt_token_ids": data},
        {"prompt_token_ids": tuple(data)},
        {"prompt_token_ids": np.array(data)},
        {"prompt_token_ids": np.array(data, dtype=np.uint8)},
    ]
    results = llm.generate(forms, GREEDY)
    assert [r.prompt_token_ids for r in results] == [data] * len(forms)
    assert [r.prompt for r in results] == ["class Path:"] * 2 + [None] * 4
    texts = {r.outputs[0].text for r in results}
    assert len(texts) == 1
    assert llm.generate(iter(forms[:2]), GREEDY)[1].outputs[0].text in texts


def test_results_stand_in_the_order_of_the_prompts(token_llm):
    """Shorter requests end earlier, and there are more requests than can run."""
    prompts = [{"prompt_token_ids": ids(i, 1 + 7 * ((i * 5) % 11))} for i in range(20)]
    params = [
        SamplingParams(temperature=0, max_tokens=1 + (i * 7) % 9, ignore_eos=True)
        for i in range(20)
    ]
    results = token_llm.generate(prompts, params)
    assert [r.prompt_token_ids for r in results] == [p["prompt_token_ids"] for p in prompts]
    assert [len(r.outputs[0].token_ids) for r in results] == [p.max_tokens for p in params]
    assert len({r.request_id for r in results}) == 20
    alone = [token_llm.generate(p, q)[0] for p, q in zip(prompts, params, strict=True)]
    assert tokens_of(results) == tokens_of(alone)


def test_several_continuations_draw_differently(token_llm):
    params = SamplingParams(n=4, seed=3, max_tokens=12, ignore_eos=True, prompt_logprobs=1)
    (result,) = token_llm.generate({"prompt_token_ids": ids(1, 40)}, params)
    assert [o.index for o in result.outputs] == [0, 1, 2, 3]
    assert len({tuple(o.token_ids) for o in result.outputs}) == 4
    assert len(result.prompt_logprobs) == 40
    (again,) = token_llm.generate({"prompt_token_ids": ids(1, 40)}, params)
    assert [o.token_ids for o in again.outputs] == [o.token_ids for o in result.outputs]


def test_without_a_seed_equal_prompts_draw_differently(token_llm):
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    results = token_llm.generate([{"prompt_token_ids": ids(1, 9)}] * 5, params)
    assert len({tuple(t) for t in tokens_of(results)}) == 5


def test_the_engines_seed_repeats_a_run(token_folder):
    def run(seed):
        llm = LLM(token_folder, seed=seed, kv_cache_memory="1MiB")
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        return tokens_of(llm.generate([{"prompt_token_ids": ids(1, 9)}] * 3, params))

    assert run(5) == run(5)
    assert run(5) != run(6)


def test_cached_tokens_are_told(token_llm):
    prompt = {"prompt_token_ids": ids(77, 100)}
    first, second = (token_llm.generate(prompt, GREEDY)[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == 90
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_smaller_priority_first(token_folder):
    llm = LLM(token_folder, kv_cache_memory="1MiB", max_num_seqs=1, enable_prefix_caching=False)
    order = []
    retire = llm.engine.core.scheduler.finish

    def noted(request):
        order.append(request.num_prompt)
        retire(request)

    llm.engine.core.scheduler.finish = noted
    prompts = [{"prompt_token_ids": ids(i, 10 + i)} for i in range(4)]
    llm.generate(prompts, GREEDY, priority=[3, 1, 2, 1])
    assert order == [11, 13, 12, 10]
    with pytest.raises(BadRequest, match="1 priorities for 2 prompts"):
        llm.generate(prompts[:2], GREEDY, priority=[1])


def test_stream_pieces_joined_are_the_text(llm):
    prompt = "#key abcd=48213\n é 日本 #ask"
    params = SamplingParams(temperature=1.5, seed=1, max_tokens=80)
    (whole,) = llm.generate(prompt, params)
    pieces, lengths = [], []
    for piece, result in llm.stream(prompt, params):
        pieces.append(piece)
        lengths.append(len(result.outputs[0].token_ids))
    assert "".join(pieces) == whole.outputs[0].text == result.outputs[0].text
    assert result.finished
    assert lengths == list(range(1, 81))


def test_stop_strings(llm):
    prompt = "import os\nimport sys\nimport "
    params = SamplingParams(temperature=0, max_tokens=60)
    (free,) = llm.generate(prompt, params)
    text = free.outputs[0].text
    stop = text[20:23]
    at = text.index(stop)
    stopping = SamplingParams(temperature=0, max_tokens=60, stop=["\x00never", stop])
    (result,) = llm.generate(prompt, stopping)
    (output,) = result.outputs
    assert output.text == text[:at]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert output.token_ids == free.outputs[0].token_ids[: at + len(stop)]
    joined = "".join(piece for piece, _ in llm.stream(prompt, stopping))
    assert joined == text[:at]


def test_stop_ids_and_end_of_sequence(token_llm):
    prompt = {"prompt_token_ids": ids(4, 30)}
    free = token_llm.generate(prompt, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    tokens = free[0].outputs[0].token_ids
    stop = tokens[5]
    at = tokens.index(stop)
    (result,) = token_llm.generate(
        prompt, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, stop_token_ids=[stop])
    )
    output = result.outputs[0]
    assert output.token_ids == tokens[: at + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    forced = SamplingParams(temperature=0, max_tokens=9, logit_bias={1: 100.0})
    (ended,) = token_llm.generate(prompt, forced)
    assert ended.outputs[0].token_ids == [1]
    assert (ended.outputs[0].finish_reason, ended.outputs[0].stop_reason) == ("stop", None)


def test_chat_without_a_template_is_plain(llm):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hello"},
    ]
    (result,) = llm.chat(messages, GREEDY)
    assert bytes(result.prompt_token_ids) == b"system: Be brief.\nuser: hello\nassistant:"
    both = llm.chat([messages, messages[1:]], GREEDY)
    assert bytes(both[1].prompt_token_ids) == b"user: hello\nassistant:"
    assert both[0].outputs[0].text == result.outputs[0].text


def test_chat_uses_the_models_template(text_folder, tmp_path):
    for file in text_folder.iterdir():
        if file.name != "golden.safetensors":
            shutil.copy(file, tmp_path / file.name)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    path.write_text(json.dumps(config))
    llm = LLM(tmp_path, dtype="float32", kv_cache_memory="8MiB")
    (result,) = llm.chat([{"role": "user", "content": "hi"}], GREEDY)
    assert bytes(result.prompt_token_ids) == b"<user>hi<assistant>"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "messages is empty"),
        ([{"role": "user"}], r"messages\[0\] needs a string 'content'"),
        ([{"content": "x"}], r"messages\[0\] needs a string 'role'"),
        ([{"role": "user", "content": 5}], "content"),
        ([[]], "messages is empty"),
    ],
)
def test_bad_messages(llm, messages, words):
    with pytest.raises(BadRequest, match=words):
        llm.chat(messages)


def test_chat_needs_a_tokenizer(token_llm):
    with pytest.raises(BadRequest, match="no tokenizer"):
        token_llm.chat([{"role": "user", "content": "hi"}])


def test_closing_a_stream_gives_its_pages_back(token_llm):
    stream = token_llm.stream({"prompt_token_ids": ids(9, 200)}, GREEDY)
    _, result = next(stream)
    assert token_llm.engine.core.has_work
    stream.close()
    assert_idle(token_llm)
    assert result.outputs[0].finish_reason == "abort"
    assert next(token_llm.stream({"prompt_token_ids": [5]}, GREEDY))[1].outputs[0].token_ids


def test_a_stream_has_one_continuation(token_llm):
    with pytest.raises(BadRequest, match="n is 2"):
        next(token_llm.stream({"prompt_token_ids": [5]}, SamplingParams(n=2)))


def test_a_stream_moved_by_other_calls_loses_nothing(llm):
    """generate() inside a stream steps both; the stream then yields what it missed."""
    (whole,) = llm.generate("def f(", GREEDY)
    stream = llm.stream("def f(", GREEDY)
    pieces = [next(stream)[0]]
    llm.generate("class ", SamplingParams(max_tokens=30))
    rest = list(stream)
    pieces += [piece for piece, _ in rest]
    assert "".join(pieces) == whole.outputs[0].text
    assert rest[-1][1].finished


def test_two_streams_side_by_side(llm):
    prompts = ["def f(", "class A"]
    whole = [result.outputs[0].text for result in llm.generate(prompts, GREEDY)]
    joined = ["", ""]
    streams = [llm.stream(prompt, GREEDY) for prompt in prompts]
    while streams[0] or streams[1]:
        for i, stream in enumerate(streams):
            piece = next(stream, None) if stream else None
            if piece is None:
                streams[i] = None
            else:
                joined[i] += piece[0]
    assert joined == whole


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_an_interrupted_step_leaves_the_llm_usable(token_llm, monkeypatch, error, at):
    """Ctrl-C inside the model, at prefill and at decode; half of the requests are still queued."""
    prompts = [{"prompt_token_ids": ids(i, 60)} for i in range(16)]
    want = tokens_of(token_llm.generate(prompts, GREEDY))
    executor = token_llm.engine.core.executor
    launch, calls = executor.launch, iter(range(100))

    def interrupted(plan):
        if next(calls) == at:
            raise error
        return launch(plan)

    monkeypatch.setattr(executor, "launch", interrupted)
    with pytest.raises(error):
        token_llm.generate(prompts, GREEDY)
    assert_idle(token_llm)
    monkeypatch.undo()
    assert tokens_of(token_llm.generate(prompts, GREEDY)) == want


def test_statistics_add_up(token_folder):
    llm = LLM(token_folder, kv_cache_memory="1MiB")
    llm.generate([{"prompt_token_ids": ids(i, 20)} for i in range(3)], GREEDY)
    stats = llm.stats()
    assert stats.prompt_tokens == stats.prefill_tokens == 60
    assert stats.generated_tokens == 18
    assert stats.decode_tokens == 15
    assert stats.steps == 6
    # Two layers; 25 tokens and one landmark of each prompt have run.
    assert stats.queries == 2 * 3 * 26
    assert 0 < stats.pages_read <= stats.pages_held
    assert stats.prefill_seconds > 0
    assert stats.decode_seconds > 0


def test_after_shutdown_the_model_is_gone(token_folder):
    llm = LLM(token_folder, kv_cache_memory="1MiB")
    llm.shutdown()
    with pytest.raises(AttributeError):
        llm.generate({"prompt_token_ids": [5]})


def test_chunks_that_choose_no_token_have_no_logits(token_folder, monkeypatch):
    llm = LLM(token_folder, kv_cache_memory="1MiB", chunked_prefill_size=16)
    model = llm.engine.runner.model
    rows, logits = [], model.logits
    monkeypatch.setattr(model, "logits", lambda h: rows.append(len(h)) or logits(h))
    llm.generate([{"prompt_token_ids": ids(1, 100)}], SamplingParams(temperature=0, max_tokens=2))
    assert llm.stats().steps > 3
    assert rows == [1, 1]


@pytest.mark.parametrize("n", [1, 2])
def test_a_prompt_as_long_as_the_context_is_scored(token_folder, n):
    llm = LLM(token_folder, device="cpu", kv_cache_memory="4MiB", max_model_len=100)
    prompt = ids(3, 100)
    scored = SamplingParams(max_tokens=0, prompt_logprobs=2, n=n)
    shorter = SamplingParams(max_tokens=1, prompt_logprobs=2, logprobs=2, temperature=0.0)
    full, part = llm.generate(
        [{"prompt_token_ids": prompt}, {"prompt_token_ids": prompt[:-1]}], [scored, shorter]
    )
    assert [(o.token_ids, o.finish_reason) for o in full.outputs] == [([], "length")] * n
    assert len(full.prompt_logprobs) == 100
    for i in range(1, 99):
        one, other = full.prompt_logprobs[i], part.prompt_logprobs[i]
        assert one[prompt[i]].logprob == pytest.approx(other[prompt[i]].logprob, abs=1e-4)
    assert full.prompt_logprobs[99][prompt[99]].rank >= 1
    with pytest.raises(TooLong):
        llm.generate({"prompt_token_ids": [*prompt, 5]}, scored)


def test_a_stream_of_a_prompt_that_is_only_scored(token_llm):
    params = SamplingParams(max_tokens=0, prompt_logprobs=0, logprobs=1)
    *_, (text, result) = token_llm.stream({"prompt_token_ids": [5, 6, 7]}, params)
    assert (text, result.finished, result.outputs[0].token_ids) == ("", True, [])
    assert len(result.prompt_logprobs) == 3


def test_calls_without_parameters_follow_the_models_recommendation(token_folder, tmp_path):
    folder = shutil.copytree(token_folder, tmp_path / "model")
    recommended = {"temperature": 0.0, "repetition_penalty": 1.3}
    (folder / "generation_config.json").write_text(json.dumps(recommended))
    llm = LLM(folder, device="cpu", kv_cache_memory="4MiB")
    prompt = {"prompt_token_ids": ids(4, 20)}
    params = SamplingParams(**recommended)
    assert llm.default_params == params
    assert tokens_of(llm.generate(prompt)) == tokens_of(llm.generate(prompt, params))
    *_, (_, streamed) = llm.stream(prompt)
    assert tokens_of([streamed]) == tokens_of(llm.generate(prompt, params))
