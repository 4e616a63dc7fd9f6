"""Encoding, the chat template, and the cost of importing the tokenizer."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest

from cairn.config import default_model_path
from cairn.engine.tokenizer import Tokenizer, load_tokenizer
from cairn.errors import BadModel, BadRequest, TooLong
from tests.engine import vocabularies

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a": "é"}'}}


@pytest.fixture(scope="module")
def bytewise() -> Tokenizer:
    """No chat template; a token id is a byte."""
    return Tokenizer(default_model_path())


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return vocabularies.qwen(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def qwen(folder) -> Tokenizer:
    return Tokenizer(folder)


def with_template(folder: Path, path: Path, template: object) -> Tokenizer:
    shutil.copytree(folder, path)
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    return Tokenizer(path)


def shown(tokenizer: Tokenizer, *args, **kwargs) -> str:
    """The ids of a conversation as text, with special tokens."""
    return b"".join(map(tokenizer.token_bytes, tokenizer.apply_chat(*args, **kwargs))).decode()


def test_a_template_writes_special_tokens(qwen):
    ids = qwen.apply_chat([USER])
    assert ids[0] in qwen.special_ids
    assert shown(qwen, [USER]) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert shown(qwen, [USER], add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


def test_text_parts_are_lines(qwen, bytewise):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    message = {"role": "user", "content": parts}
    assert "user\none\ntwo<|im_end|>" in shown(qwen, [message])
    assert shown(bytewise, [message]) == "user: one\ntwo\nassistant:"


def test_tools_and_their_calls(qwen):
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
        {"role": "assistant", "content": "So.", "tool_calls": [CALL, CALL], "refusal": None},
    ]
    text = shown(qwen, messages, tools=[TOOL])
    call = '\n<tool_call>\n{"name": "look", "arguments": {"a": "é"}}\n</tool_call>'
    assert text == (
        f"<|im_start|>system\n{json.dumps(TOOL)}\n<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n"
        f"<|im_start|>assistant{call}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n"
        f"<|im_start|>assistant\nSo.{call}{call}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == '{"a": "é"}'


@pytest.mark.parametrize("arguments", ['{"a": ', "[1]", "nothing"])
def test_a_malformed_call_in_a_history(folder, tmp_path, arguments):
    templates = {
        "{{ c.function.arguments if c.function.arguments is string else 'no' }}": arguments,
        "{{ c.function.arguments | tojson }}": json.dumps(arguments),
        "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}": (
            f"arguments={arguments}"
        ),
        "{% for k in c.function.arguments.keys() %}{{ k }}{% endfor %}": "arguments",
    }
    call = {"id": "c1", "function": {"name": "look", "arguments": arguments}}
    messages = [USER, {"role": "assistant", "content": "x", "tool_calls": [call]}]
    for i, (part, text) in enumerate(templates.items()):
        loops = "{% for m in messages %}{% for c in m.tool_calls %}"
        template = f"{loops}{part}{{% endfor %}}{{% endfor %}}"
        tokenizer = with_template(folder, tmp_path / str(i), template)
        assert shown(tokenizer, messages) == text


def test_template_variables(qwen):
    text = shown(qwen, [USER], template_kwargs={"enable_thinking": False})
    assert text.endswith("assistant\n<think>\n\n</think>\n\n")
    assert shown(qwen, [USER], None, {"enable_thinking": True}).endswith("assistant\n")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("unknown", "no variable 'unknown'"),
        ("chat_template", "'chat_template' is not a variable"),
        ("tokenize", "no variable 'tokenize'"),
        ("messages", "'messages' is not a variable"),
        ("add_generation_prompt", "not a variable"),
        ("a.b(", "has no variable"),
    ],
)
def test_variables_that_a_request_may_not_set(qwen, name, words):
    with pytest.raises(BadRequest, match=words):
        qwen.apply_chat([USER], template_kwargs={name: "x"})


def test_the_last_message_goes_on(qwen, bytewise):
    messages = [USER, {"role": "assistant", "content": "Well, "}]
    text = shown(qwen, messages, continue_final_message=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nWell, "
    assert shown(bytewise, messages, continue_final_message=True) == "user: hi\nassistant: Well, "
    with pytest.raises(BadRequest, match="role is 'user'"):
        qwen.apply_chat([USER], continue_final_message=True)
    with pytest.raises(BadRequest, match="both set"):
        qwen.apply_chat(messages, continue_final_message=True, add_generation_prompt=True)


def test_the_plain_template(bytewise):
    messages = [{"role": "system", "content": "Be brief."}, USER]
    assert bytewise.chat_template is None
    assert shown(bytewise, messages) == "system: Be brief.\nuser: hi\nassistant:"
    text = shown(bytewise, messages, add_generation_prompt=False)
    assert text == "system: Be brief.\nuser: hi\n"


def test_tools_in_the_plain_template(bytewise):
    messages = [
        USER,
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "So.", "tool_calls": [CALL]},
    ]
    call = '<tool_call>\n{"name": "look", "arguments": {"a": "é"}}\n</tool_call>'
    assert shown(bytewise, messages, [TOOL]) == (
        'tools, called as <tool_call>{"name": ..., "arguments": {...}}</tool_call>:\n'
        f"{json.dumps(TOOL)}\nuser: hi\nassistant: {call}\ntool: 42\n"
        f"assistant: So.\n{call}\nassistant:"
    )


def test_the_plain_template_has_no_variables(bytewise):
    with pytest.raises(BadRequest, match="chat template variables are given"):
        bytewise.apply_chat([USER], template_kwargs={"x": 1})


def test_a_template_without_tools_refuses_them(folder, tmp_path):
    tokenizer = with_template(folder, tmp_path / "m", "{{ messages[0].content }}")
    assert shown(tokenizer, [USER]) == "hi"
    with pytest.raises(BadRequest, match="no place for tools"):
        tokenizer.apply_chat([USER], tools=[TOOL])


def test_a_template_of_its_own_for_tools(folder, tmp_path):
    templates = [
        {"name": "default", "template": "{{ messages[0].content }}"},
        {"name": "tool_use", "template": "{{ tools | length }} {{ messages[0].content }}"},
    ]
    tokenizer = with_template(folder, tmp_path / "m", templates)
    assert shown(tokenizer, [USER]) == "hi"
    assert shown(tokenizer, [USER], tools=[TOOL]) == "1 hi"
    assert "tools" in tokenizer.chat_template


def test_developer_is_system_where_the_template_does_not_know_it(qwen, folder, tmp_path):
    message = {"role": "developer", "content": "Be brief."}
    assert shown(qwen, [message]).startswith("<|im_start|>system\nBe brief.")
    assert message["role"] == "developer"
    template = "{{ messages[0].role }}{# developer #}"
    tokenizer = with_template(folder, tmp_path / "m", template)
    assert shown(tokenizer, [message]) == "developer"


def test_a_template_that_refuses(qwen, folder, tmp_path):
    with pytest.raises(BadRequest, match="refuses the messages: unexpected role critic"):
        qwen.apply_chat([{"role": "critic", "content": "x"}])
    trips = with_template(folder, tmp_path / "m", "{{ messages[0].content + 5 }}")
    with pytest.raises(BadRequest, match="refuses the messages"):
        trips.apply_chat([USER])


def test_a_refusal_is_short(folder, tmp_path):
    quotes = with_template(folder, tmp_path / "m", "{{ raise_exception(messages[0].content) }}")
    for message in (USER | {"content": "x" * 10**6}, USER | {"content": {"x": "x" * 10**6}}):
        with pytest.raises(BadRequest) as refused:
            quotes.apply_chat([message])
        assert len(str(refused.value)) < 1000


def test_a_template_may_not_leave_its_sandbox(folder, tmp_path):
    template = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(BadRequest, match="refuses the messages"):
        with_template(folder, tmp_path / "m", template).apply_chat([USER])


def test_a_broken_template_is_the_models_fault(folder, tmp_path):
    with pytest.raises(BadModel, match="chat template is broken"):
        with_template(folder, tmp_path / "m", "{% if %}").apply_chat([USER])


def test_half_a_surrogate_pair(qwen, bytewise):
    for tokenizer in (qwen, bytewise):
        for call in (
            tokenizer.encode,
            lambda t, use=tokenizer: use.apply_chat([USER | {"content": t}]),
        ):
            with pytest.raises(BadRequest, match="half a surrogate pair at character .*ud83d"):
                call("ok \ud83d ok")
    with pytest.raises(BadRequest, match="surrogate"):
        qwen.apply_chat([USER], template_kwargs={"enable_thinking": False}, tools=[{"a": "\udc00"}])


def test_a_text_that_cannot_fit_is_refused_before_it_is_read(bytewise, qwen):
    text = "x" * 10_000_000
    with pytest.raises(TooLong, match="at least 10000000 tokens, but 4096"):
        bytewise.encode(text, limit=4096)
    with pytest.raises(TooLong, match="at least"):
        bytewise.apply_chat([USER | {"content": text}], limit=4096)
    assert len(bytewise.encode("x" * 4096, limit=4096)) == 4096
    assert len(qwen.encode("x" * 100, limit=1)) > 1


def test_many_texts_are_encoded_as_each_alone(qwen, bytewise, monkeypatch):
    texts = ["", "a", *(f"text {i} " * (i % 7) for i in range(100)), "\u00e9" * 3000, "end"]
    for tokenizer in (qwen, bytewise):
        alone = [tokenizer.encode(text) for text in texts]
        for together in (1, 500, 1 << 20):
            monkeypatch.setattr("cairn.engine.tokenizer.BATCH_BYTES", together)
            assert tokenizer.encode_all(texts) == alone
        assert tokenizer.encode_all([]) == []
        with pytest.raises(BadRequest, match="half a surrogate pair at character 1"):
            tokenizer.encode_all(["fine", "a\ud800"])


def test_a_long_word_is_encoded(qwen, bytewise):
    text = "landmark" * 40_000
    assert qwen.decode(qwen.encode(text)) == text
    assert bytewise.encode(text) == list(text.encode())


def test_a_limit_counts_no_more_than_there_is(tmp_path, qwen):
    """Text that an added token absorbs, or that is normalized, may result in no token."""
    path = tmp_path / "m"
    shutil.copytree(default_model_path(), path, ignore=shutil.ignore_patterns("*.safetensors"))
    description = json.loads((path / "tokenizer.json").read_text())
    greedy = {"id": 256, "content": "<sep>", "single_word": False, "lstrip": False}
    greedy |= {"rstrip": True, "normalized": False, "special": True}
    description["added_tokens"] = [greedy]
    (path / "tokenizer.json").write_text(json.dumps(description))
    assert Tokenizer(path).encode("<sep>" + " " * 1000, limit=1) == [256]
    decomposed = "\u1112\u1161\u11ab" * 100
    assert len(qwen.encode(decomposed, limit=300)) <= 300


def test_a_text_that_the_library_cannot_read(tmp_path, monkeypatch, qwen):
    class PanicException(BaseException):
        pass

    backend = SimpleNamespace(normalizer=1, encode_batch_fast=Mock(side_effect=PanicException("x")))
    monkeypatch.setattr(qwen, "_backend", backend)
    with pytest.raises(BadRequest, match="cannot read the text: x"):
        qwen.encode("text")
    backend.encode_batch_fast.side_effect = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        qwen.encode("text")
    path = vocabularies.wordpiece(tmp_path)
    text = (path / "tokenizer.json").read_text().replace("[UNK]", "[GONE]", 1)
    (path / "tokenizer.json").write_text(text.replace('"[UNK]":', '"[LOST]":'))
    with pytest.raises(BadRequest, match="cannot read the text"):
        Tokenizer(path).encode("\U0010ffff")


@pytest.mark.slow
def test_a_run_of_spaces_beyond_the_librarys_limits(qwen):
    with pytest.raises(BadRequest, match="cannot read the text"):
        qwen.encode(" " * 10_000_000)


def test_special_tokens_of_a_text(tmp_path):
    path = vocabularies.llama(tmp_path / "m")
    description = json.loads((path / "tokenizer.json").read_text())
    start = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    description["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [start, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    description["truncation"] = {
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
        "direction": "Right",
    }
    (path / "tokenizer.json").write_text(json.dumps(description))
    tokenizer = Tokenizer(path)
    ids = tokenizer.encode("the stone and the landmark of the stone")
    assert ids[0] == 1 and len(ids) > 4
    assert tokenizer.encode("the stone", add_special_tokens=False)[0] != 1


@pytest.mark.parametrize("ids", [[-1], [5, 2**32], [10**30]])
def test_numbers_that_are_no_ids(bytewise, ids):
    with pytest.raises(BadRequest, match="is not a token id"):
        bytewise.decode(ids)


def test_a_folder_without_tokenizer(tmp_path):
    assert load_tokenizer(tmp_path) is None


def test_nothing_of_it_loads_torch(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "with_config")
    (tmp_path / "with_config" / "config.json").write_text('{"model_type": "qwen3"}')
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(folder / "tokenizer.json", bare)
    script = """
import sys
from pathlib import Path
from cairn.config import default_model_path
from cairn.engine.tokenizer import load_tokenizer

def loaded(*names):
    return {name.split(".")[0] for name in sys.modules} & set(names)

folders = (default_model_path(), *map(Path, sys.argv[1:]))
assert all(map(load_tokenizer, folders)) and not loaded("transformers")
for folder in folders:
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.apply_chat([{"role": "user", "content": "hällo"}], add_generation_prompt=False)
    stream = tokenizer.detokenizer(ids)
    text = "".join(map(stream.push, tokenizer.encode("日本語 text"))) + stream.flush()
    assert text == "日本語 text", text
    assert tokenizer.token_bytes(5) is not None
assert not loaded("torch", "triton", "jax")
"""
    command = [sys.executable, "-c", script, str(folder), str(tmp_path / "with_config"), str(bare)]
    subprocess.run(command, check=True)


def test_prompts_that_never_come_again_are_not_kept():
    tokenizer = Tokenizer(default_model_path())
    process = psutil.Process()

    def encode(numbers):
        for n in numbers:
            tokenizer.encode(f"{n} is a prompt of its own, too short for the library to forget it")

    encode(range(1500))
    before = process.memory_info().rss
    encode(range(1500, 9000))
    assert process.memory_info().rss - before < 8 << 20


def test_named_tokens(qwen, bytewise):
    assert qwen.named_tokens["eos_token"] == "<|im_end|>"
    assert set(bytewise.named_tokens.values()) == {None}
