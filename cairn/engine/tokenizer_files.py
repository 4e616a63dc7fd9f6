"""Reads the tokenizer of a model folder.

tokenizer.json and tokenizer_config.json are read with the library `tokenizers`, to the same result
as `PreTrainedTokenizerFast` of transformers: every process of a server reads them, and importing
transformers would take half of a server's start. Folders with other files are left to transformers.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from cairn.errors import BadModel
from cairn.models.checkpoint import is_gguf

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
CONFIG_FILE = "tokenizer_config.json"
DECODER = "added_tokens_decoder"
FOR_TRANSFORMERS = frozenset({"fast_tokenizer_files", "fix_mistral_regex"})
"""Settings of tokenizer_config.json that only transformers follows."""
OLDER_FILES = ("special_tokens_map.json", "added_tokens.json")
"""What tokenizer_config.json replaces where it has `added_tokens_decoder`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """What the files of a tokenizer say.

    Attributes:
        backend: text to ids, ids to text.
        named: special tokens by their names in tokenizer_config.json, such as `eos_token`.
        templates: chat templates by name; `default` is that of a model with one.
        clean_up: decoding removes spaces before punctuation.
        kind: class of transformers that reads the files.
    """

    backend: Backend
    named: Mapping[str, str]
    templates: Mapping[str, str]
    clean_up: bool
    kind: str


def read_tokenizer(path: Path) -> TokenizerFiles:
    """The tokenizer of a folder or GGUF file. Raises BadModel for one that cannot be read."""
    try:
        if is_gguf(path) or not (path / "tokenizer.json").exists():
            return _by_transformers(path)
        config = _json(path / CONFIG_FILE)
        older = any((path / name).exists() for name in OLDER_FILES)
        if config.keys() & FOR_TRANSFORMERS or (older and DECODER not in config):
            return _by_transformers(path)
        return _from_json(path, config)
    except Exception as error:
        # Whatever the library raises on a broken file, the user sees one line.
        raise BadModel(
            f"the tokenizer in {path} cannot be read: {error}",
            "Check tokenizer.json, or remove it and pass prompt_token_ids",
        ) from error


def _from_json(folder: Path, config: dict[str, Any]) -> TokenizerFiles:
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
    if backend.padding is not None:
        config.setdefault("pad_token", backend.padding["pad_token"])
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if isinstance(extra, dict):
        config |= extra
        extra = []
    named = {
        name: _special(value)
        for name, value in config.items()
        if name.endswith("_token") and isinstance(value, str | dict)
    }
    further = [*map(_special, extra)]
    added = {int(i): AddedToken(**token) for i, token in config.get(DECODER, {}).items()}
    _add_missing(backend, added, named.values(), further)
    return TokenizerFiles(
        backend=backend,
        named={name: token.content for name, token in named.items()},
        templates=_templates(folder, config.get("chat_template")),
        clean_up=bool(config.get("clean_up_tokenization_spaces", False)),
        kind="PreTrainedTokenizerFast",
    )


def _special(value: str | Mapping[str, Any]) -> AddedToken:
    """A special token that a file names or describes."""
    fields = {"content": value} if isinstance(value, str) else dict(value)
    fields.pop("__type", None)
    return AddedToken(**{**fields, "special": True})


def _add_missing(
    backend: Backend,
    added: Mapping[int, AddedToken],
    named: Collection[AddedToken],
    extra: Iterable[AddedToken],
) -> None:
    """Add the tokens of the settings that tokenizer.json lacks or describes otherwise."""
    held = backend.get_added_tokens_decoder().values()
    # Tokens are equal when their texts are; their descriptions show the rest.
    described = {repr(token) for token in held}
    missing = [token for _, token in sorted(added.items()) if repr(token) not in described]
    texts = {token.content for token in (*held, *missing)}
    for token in (*named, *extra):
        if token.content not in texts:
            texts.add(token.content)
            missing.append(token)
    special = {token.content for token in named}
    for token in missing:
        token.special = token.special or token.content in special
    backend.add_tokens(missing)


def _templates(folder: Path, configured: Any) -> dict[str, str]:
    """Chat templates by name: files of their own stand before those of tokenizer_config.json."""
    found = {
        path.stem: path.read_text("utf-8")
        for path in folder.glob("additional_chat_templates/*.jinja")
    }
    plain = folder / "chat_template.jinja"
    if plain.exists():
        found["default"] = plain.read_text("utf-8")
    if found or not configured:
        return found
    if isinstance(configured, str):
        return {"default": configured}
    if isinstance(configured, list):
        return {each["name"]: each["template"] for each in configured}
    return dict(configured)


def _json(path: Path) -> dict[str, Any]:
    """A file's object, an empty one where there is no file."""
    if not path.exists():
        return {}
    read: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return read


def _by_transformers(path: Path) -> TokenizerFiles:
    """As transformers reads a GGUF file or a folder. Python files of the folder are never run."""
    from transformers.utils import logging

    # The library warns that it does not know our model types; it only reads the tokenizer here.
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        read = _transformers_tokenizer(path)
    finally:
        logging.set_verbosity(verbosity)
    templates = read.chat_template or {}
    return TokenizerFiles(
        backend=read.backend_tokenizer,
        named=read.special_tokens_map,
        templates={"default": templates} if isinstance(templates, str) else templates,
        clean_up=bool(read.clean_up_tokenization_spaces),
        kind=type(read).__name__,
    )


def _transformers_tokenizer(path: Path) -> Any:
    import transformers

    if is_gguf(path):
        return transformers.AutoTokenizer.from_pretrained(
            path.parent, gguf_file=path.name, local_files_only=True
        )
    if (path / "tokenizer.json").exists():
        # This file says everything, and the class that only reads it needs no torch.
        return transformers.PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
    # Older files are converted by the class of their model; finding it imports torch.
    return transformers.AutoTokenizer.from_pretrained(
        path, trust_remote_code=False, local_files_only=True
    )
