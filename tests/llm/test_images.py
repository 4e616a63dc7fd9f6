"""Images and videos in LLM.generate and LLM.chat."""

from __future__ import annotations

import numpy as np
import pytest

from cairn import LLM, BadRequest, SamplingParams
from tests.llm.conftest import assert_idle
from tests.seeing import END, IMAGE, START, VIDEO, data_url, file_of, picture, question, write

GREEDY = SamplingParams(temperature=0, max_tokens=4)
ONE = picture(1, 40, 56)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def llm(folder):
    made = LLM(
        folder,
        load_format="random",
        dtype="float32",
        device="cpu",
        kv_cache_memory="8MiB",
        max_num_seqs=4,
        page_size=16,
        limit_mm_per_prompt={"image": 2, "video": 1},
    )
    yield made
    assert_idle(made)


def tokens(outputs):
    return [list(out.outputs[0].token_ids) for out in outputs]


def test_every_form_of_an_image_is_the_same(llm):
    ids = [5, START, IMAGE, END, 7]
    forms = [ONE, np.asarray(ONE), file_of(ONE), data_url(file_of(ONE)), [ONE]]
    prompts = [{"prompt_token_ids": ids, "multi_modal_data": {"image": form}} for form in forms]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    text = "a<|vision_start|><|image_pad|><|vision_end|>b"
    same = [{"prompt": text, "multi_modal_data": {"image": image}} for image in (ONE, ONE)]
    other = {"prompt": text, "multi_modal_data": {"image": picture(2, 40, 56)}}
    outputs += llm.generate([*same, other], GREEDY, use_tqdm=False)
    found = tokens(outputs)
    assert all(one == found[0] for one in found[:5])
    assert found[5] == found[6]
    count = outputs[0].prompt_token_ids.count(IMAGE)
    assert count == 35 and len(outputs[0].prompt_token_ids) == count + 4
    assert outputs[0].prompt_token_ids == outputs[4].prompt_token_ids
    # Equal tokens, other pixels.
    assert outputs[7].prompt_token_ids == outputs[6].prompt_token_ids


def test_a_chat_with_images_and_a_video(llm):
    url = data_url(file_of(ONE))
    (by_url,) = llm.chat(question(url), GREEDY, use_tqdm=False)
    messages = question()
    messages[0]["content"].insert(0, {"type": "image_pil", "image_pil": ONE})
    (by_value,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert by_url.prompt_token_ids == by_value.prompt_token_ids
    assert tokens([by_url]) == tokens([by_value])
    video = np.stack([np.asarray(picture(seed, 16, 24)) for seed in range(4)])
    messages = question()
    messages[0]["content"].insert(0, {"type": "video", "video": (video, {"fps": 2.0})})
    (seen,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert seen.prompt_token_ids.count(VIDEO) > 0
    # Two groups of frames, each between its own start and end.
    assert seen.prompt_token_ids.count(START) == seen.prompt_token_ids.count(END) == 2


def test_streams_and_several_outputs(llm):
    prompt = {"prompt_token_ids": [START, IMAGE, END], "multi_modal_data": {"image": ONE}}
    *_, (_, last) = llm.stream(prompt, GREEDY)
    params = SamplingParams(temperature=0, max_tokens=4, n=2)
    (several,) = llm.generate(prompt, params, use_tqdm=False)
    found = [list(out.token_ids) for out in several.outputs]
    assert found == [list(last.outputs[0].token_ids)] * 2


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"image": [ONE] * 3}, "3 images, of at most 2"),
        ({"video": [ONE, ONE]}, "1 placeholders of images, but 0"),
        ({"images": ONE}, "'image'"),
        ({"image": b"hello"}, "no image that can be read"),
        ({"image": np.zeros((4, 4))}, "float64"),
        ({"image": "https://example.com/a.png"}, "not allowed"),
        ([ONE], "must be a mapping"),
    ],
)
def test_refused(llm, data, words):
    prompt = {"prompt_token_ids": [IMAGE], "multi_modal_data": data}
    with pytest.raises(BadRequest, match=words):
        llm.generate(prompt, GREEDY, use_tqdm=False)


def test_without_an_encoder(folder):
    options = {"load_format": "random", "dtype": "float32", "device": "cpu"}
    blind = LLM(folder, kv_cache_memory="4MiB", limit_mm_per_prompt="image=0,video=0", **options)
    assert blind.spec.vision is None
    prompt = {"prompt_token_ids": [IMAGE], "multi_modal_data": {"image": ONE}}
    with pytest.raises(BadRequest, match="reads text only"):
        blind.generate(prompt, GREEDY, use_tqdm=False)
    # Without an image, the id of a placeholder is an ordinary token.
    assert blind.generate({"prompt_token_ids": [IMAGE, 5]}, GREEDY, use_tqdm=False)


@pytest.mark.parametrize(
    "options",
    [
        {"limit_mm_per_prompt": "image"},
        {"limit_mm_per_prompt": {"audio": 1}},
        {"limit_mm_per_prompt": '{"image": -1}'},
        {"max_image_pixels": 0},
        {"allowed_local_media_path": "/nowhere"},
        {"allowed_media_domains": "https://example.com"},
    ],
)
def test_bad_options(folder, options):
    from cairn import BadConfig

    with pytest.raises(BadConfig, match=next(iter(options))):
        LLM(folder, load_format="random", device="cpu", **options)
