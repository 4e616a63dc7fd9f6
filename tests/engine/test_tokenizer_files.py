"""A folder's tokenizer files are read as transformers reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken

from cairn.config import default_model_path
from cairn.engine.tokenizer import Tokenizer
from cairn.engine.tokenizer_files import read_tokenizer
from cairn.errors import BadModel
from tests.engine import vocabularies

TEXT = "the <tool>stone<new> </s><new2> <img> é!  the landmark <own><far>."
FULL = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
DECODER = {
    "0": {"content": "<unk>", **FULL, "special": True},
    "900": {"content": "<new>", **FULL, "rstrip": True, "special": False},
    # As tokenizer.json has it, but for a flag.
    "2": {"content": "</s>", **FULL, "lstrip": True, "special": True},
}
FOLDERS: dict[str, dict[str, object]] = {
    "nothing but tokenizer.json": {},
    "tokens by id": {
        "tokenizer_config.json": {
            "added_tokens_decoder": DECODER,
            "bos_token": {"__type": "AddedToken", "content": "<s>", **FULL},
            "eos_token": "<new>",
            "pad_token": None,
            "image_token": "<img>",
            "add_bos_token": True,
            "additional_special_tokens": ["<far>", "<tool>"],
            "clean_up_tokenization_spaces": True,
            "chat_template": [
                {"name": "default", "template": "a"},
                {"name": "tool_use", "template": "b"},
            ],
        },
        # Not read beside tokens by id.
        "special_tokens_map.json": {"cls_token": "<cls>"},
    },
    "older files": {
        "tokenizer_config.json": {"eos_token": "</s>", "split_special_tokens": True},
        "special_tokens_map.json": {
            "bos_token": {"content": "<own>", **FULL, "rstrip": True},
            "unk_token": "<unk>",
            "extra_special_tokens": {"video_token": "<vid>"},
        },
        "added_tokens.json": {"<new2>": 1001, "<new>": 1000, "<own>": 1002, "</s>": 2},
    },
    "templates in files": {
        "tokenizer_config.json": {
            "extra_special_tokens": {"image_token": "<img>"},
            "chat_template": "not this one",
        },
        "chat_template.jinja": "é",
        "additional_chat_templates/rag.jinja": "documents",
    },
    "one template in a file": {"chat_template.jinja": "é"},
}


def written(folder: Path, files: dict[str, object], padded: bool = False) -> Path:
    vocabularies.llama(folder)
    (folder / "tokenizer_config.json").unlink()
    if padded:
        description = json.loads((folder / "tokenizer.json").read_text())
        pad = {"pad_id": 0, "pad_type_id": 0, "pad_token": "<unk>", "direction": "Right"}
        description["padding"] = {"strategy": "BatchLongest", "pad_to_multiple_of": None, **pad}
        (folder / "tokenizer.json").write_text(json.dumps(description))
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def flags(tokens: dict[int, AddedToken]) -> dict[int, str]:
    return {i: repr(token) for i, token in tokens.items()}


def test_every_folder_is_read_as_by_transformers(tmp_path):
    from transformers import PreTrainedTokenizerFast

    for padded, (name, files) in enumerate(FOLDERS.items()):
        folder = written(tmp_path / name, files, padded=padded == 3)
        theirs = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        ours = read_tokenizer(folder)
        assert flags(ours.backend.get_added_tokens_decoder()) == flags(theirs.added_tokens_decoder)
        assert ours.backend.get_vocab() == theirs.get_vocab()
        assert ours.named == theirs.special_tokens_map, name
        template = theirs.chat_template or {}
        template = {"default": template} if isinstance(template, str) else template
        assert ours.templates == template
        assert ours.clean_up == theirs.clean_up_tokenization_spaces
        tokenizer = Tokenizer(folder)
        assert tokenizer.encode(TEXT) == theirs.encode(TEXT, padding=False)
        assert tokenizer.eos_token_id == theirs.eos_token_id
        ids = tokenizer.encode(TEXT)
        assert tokenizer._decode_all(ids) == theirs.decode(ids)


@pytest.mark.parametrize("setting", ["fix_mistral_regex", "fast_tokenizer_files"])
def test_settings_that_only_transformers_follows(tmp_path, monkeypatch, setting):
    class Reached(Exception):
        pass

    def reached(_: Path):
        raise Reached

    monkeypatch.setattr("cairn.engine.tokenizer_files._by_transformers", reached)
    folder = written(tmp_path / "m", {"tokenizer_config.json": {setting: []}})
    with pytest.raises(BadModel) as refused:
        read_tokenizer(folder)
    assert isinstance(refused.value.__cause__, Reached)


def test_templates_without_a_plain_one(tmp_path):
    template = [{"name": "rag", "template": "{{ documents }}"}]
    folder = written(tmp_path, {"tokenizer_config.json": {"chat_template": template}})
    with pytest.raises(BadModel, match=r"none of .*\['rag'\] is called 'default'"):
        Tokenizer(folder).apply_chat([{"role": "user", "content": "hi"}])


def test_a_broken_file_is_named(tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        folder = written(tmp_path / name, {name: "{"})
        with pytest.raises(BadModel, match="cannot be read"):
            read_tokenizer(folder)
    assert read_tokenizer(default_model_path()).named == {}
