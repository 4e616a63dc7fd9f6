"""The model's tokenizer: text to ids, ids to text, and the chat template. Loads no torch."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer as Backend

from cairn.engine.chat import Message, checked_messages, plain_text, with_placeholders
from cairn.engine.chat_template import RESERVED, TemplateInput, render
from cairn.engine.detokenizer import (
    ByteDetokenizer,
    Detokenizer,
    Rules,
    Spelling,
    WindowDetokenizer,
    cleaned,
    describe_decoder,
)
from cairn.engine.tokenizer_files import TOKENIZER_FILES, read_tokenizer
from cairn.errors import BadModel, BadRequest, TooLong
from cairn.models.checkpoint import is_gguf

log = logging.getLogger(__name__)

VARIABLES = "chat_template_kwargs"
"""Field of a request with further variables of the chat template."""
BATCH_BYTES = 1 << 20
"""Bytes of texts that are encoded together: the library's encodings take many times as much
memory."""
WORDS_KEPT = 1000
"""Size of the library's cache of encoded words (its default is 10,000). Where a tokenizer does not
split text into words, an entry is a whole short prompt, and the default would take tens of
megabytes."""


class Tokenizer:
    """Wrapper of a Hugging Face tokenizer. Python files of the folder are never run.

    Several threads may use it at once.

    Args:
        folder: a model folder that holds tokenizer files.

    Attributes:
        eos_token_id: what the tokenizer says ends a text, None when it does not say.
        kind: class of Hugging Face's library that reads it.
        special_ids: ids that texts leave out.
        special_texts: id -> name of those.

    Raises:
        BadModel: the files cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        files = read_tokenizer(folder)
        self._backend = files.backend
        self._named, self._templates = files.named, files.templates
        self.kind = files.kind
        # tokenizer.json may enable truncation or padding, which must not change prompts.
        self._backend.no_truncation()
        self._backend.no_padding()
        _bound_cache(self._backend)
        eos = self._named.get("eos_token")
        self.eos_token_id = None if eos is None else self._backend.token_to_id(eos)
        added = self._backend.get_added_tokens_decoder()
        self.special_texts = {i: token.content for i, token in added.items() if token.special}
        self.special_ids = frozenset(self.special_texts)
        rules = Rules.read(describe_decoder(self._backend))
        self._spelling = Spelling(self._backend, rules) if rules is not None else None
        self._spelling_all = Spelling(self._backend, rules, special=True) if rules else None
        # clean_up_tokenization_spaces would delete spaces that the model generated in byte-level
        # BPE texts.
        byte_pair = type(self._backend.model).__name__ == "BPE"
        self._clean_up = files.clean_up and not byte_pair
        self._bytes: dict[int, bytes] = {}

    @property
    def size(self) -> int:
        """Ids that have a token are below this number."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        """The model has a template of its own."""
        return bool(self._templates)

    @property
    def chat_template(self) -> str | None:
        """The model's own template (the one for tools, where it has two); None: the plain one."""
        if not self.has_chat_template:
            return None
        return self._template([])

    @property
    def named_tokens(self) -> dict[str, str | None]:
        """Its tokens for the beginning and the end of a text, for filling and for the unknown, by
        the names of Hugging Face's tokenizer_config.json."""
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        return {name: self._named.get(name) for name in names}

    @cached_property
    def special_names(self) -> dict[str, int]:
        """Special tokens, name -> id."""
        return {name: token for token, name in self.special_texts.items()}

    def encode(
        self, text: str, add_special_tokens: bool = True, limit: int | None = None
    ) -> list[int]:
        """Ids of a text.

        Args:
            text: any text; ten million characters take seconds, other threads go on meanwhile.
            add_special_tokens: with those that the tokenizer adds by itself.
            limit: a text that surely has more ids is refused at once.

        Raises:
            BadRequest: half a surrogate pair, which no encoding has, or a text that the library
                gives up on.
            TooLong: more than `limit` ids.
        """
        size = _num_bytes(text)
        least = -(-size // self._longest_token) if self._longest_token else 0
        if limit is not None and least > limit:
            raise TooLong(
                f"the text has at least {least} tokens, but {limit} are the most that fit",
                "Shorten it",
            )
        (ids,) = self._encode_batch([text], add_special_tokens)
        return ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """As `encode` of each, by all cores."""
        found: list[list[int]] = []
        begin = size = 0
        for end, text in enumerate(texts, 1):
            size += _num_bytes(text)
            if size >= BATCH_BYTES or end == len(texts):
                found += self._encode_batch(texts[begin:end], True)
                begin, size = end, 0
        return found

    def _encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        try:
            # The batch form works without the interpreter's lock and keeps no offsets.
            encodings = self._backend.encode_batch_fast(
                list(texts), add_special_tokens=add_special_tokens
            )
        except BaseException as error:
            # The library panics, which is not an Exception, on texts beyond its limits, such as ten
            # million consecutive spaces.
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":
                raise BadRequest(
                    f"the model's tokenizer cannot read the text: {error}", "Shorten it"
                ) from error
            raise
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out: what a stream of them shows, joined.

        Raises:
            BadRequest: a number that is no id.
        """
        if ids and not (min(ids) >= 0 and max(ids) < 2**32):
            bad = next(token for token in ids if not 0 <= token < 2**32)
            raise BadRequest(f"{bad} is not a token id", "Ids are not negative")
        stream = self.detokenizer()
        return stream.push(*ids) + stream.flush()

    def detokenizer(self, prompt: Sequence[int] = (), special: bool = False) -> Detokenizer:
        """Turns the ids of one output that follows `prompt` into text; `special`: it shows special
        tokens."""
        spelling = self._spelling_all if special else self._spelling
        if spelling is not None:
            return ByteDetokenizer(spelling, prompt, self._clean_up)
        if special:
            return WindowDetokenizer(self._decode_all, frozenset[int]().__contains__, prompt)
        return WindowDetokenizer(self._decode_window, self.special_ids.__contains__, prompt)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one id as it stands behind others, special tokens shown; empty for an id
        without a token."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._spelled(token)
        return known

    def _spelled(self, token: int) -> bytes:
        if self._spelling is not None:
            return self._spelling.show(token)
        text: str = self._backend.decode([token], skip_special_tokens=False)
        return text.encode()

    def token_text(self, token: int) -> str:
        """`token_bytes` as text; part of a character becomes a replacement sign."""
        return self.token_bytes(token).decode(errors="replace")

    def apply_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        placeholders: Mapping[str, str] = MappingProxyType({}),
        limit: int | None = None,
    ) -> list[int]:
        """Ids of a conversation; the model's chat template runs here, for as long as it takes.

        Args:
            messages, tools, template_kwargs, add_generation_prompt, continue_final_message,
                placeholders: as in `chat_input`.
            limit: as in `encode`.

        Raises:
            BadRequest: as `chat_input`; also messages that the template does not take.
            TooLong: more than `limit` ids.
            BadModel: the template is broken.
        """
        given = self.chat_input(
            messages,
            tools,
            template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            placeholders=placeholders,
        )
        if isinstance(given, str):
            return self.encode(given, limit=limit)
        return self.encode(render(given), add_special_tokens=False, limit=limit)

    def chat_input(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        placeholders: Mapping[str, str] = MappingProxyType({}),
    ) -> TemplateInput | str:
        """What the model's chat template is to render: its text is encoded without special tokens.

        For a model without a template it is the whole text, to be encoded with special tokens: a
        line `role: content` per message, then `assistant:`; see `cairn.engine.chat.plain_text`. The
        role `developer` is called `system` for templates that do not know it.

        Args:
            messages: role and content (a string or a list of text parts); tool calls and their
                results as OpenAI writes them.
            tools: function descriptions as OpenAI writes them, shown to the model.
            template_kwargs: further variables that the model's template reads.
            add_generation_prompt: end with the beginning of the assistant's answer. None: unless
                the last message is continued.
            continue_final_message: the last message is the assistant's and is left open.
            placeholders: type of a content part that stands for an image or a video -> the text
                that does so in a prompt.

        Raises:
            BadRequest: messages that are none, something that the template does not read or that
                a model without a template has no place for.
        """
        checked = checked_messages(messages, placeholders)
        if continue_final_message and add_generation_prompt:
            raise BadRequest("continue_final_message and add_generation_prompt are both set")
        if continue_final_message and checked[-1]["role"] != "assistant":
            raise BadRequest(
                f"the last message's role is {checked[-1]['role']!r}",
                "continue_final_message needs one of the assistant",
            )
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        if not self.has_chat_template:
            if template_kwargs:
                raise _refused(
                    VARIABLES,
                    "chat template variables are given, but this model has no chat template",
                )
            text = plain_text(
                with_placeholders(checked, placeholders), add_generation_prompt, tools
            )
            return text if add_generation_prompt or continue_final_message else f"{text}\n"
        shown = list(tools) if tools else None
        variables = dict(template_kwargs or {})
        template = self._template(shown)
        _check_variables(template, shown, variables)
        if not re.search(r"\bimage", template):
            # The template does not support images, and maybe not content parts either.
            checked = with_placeholders(checked, placeholders)
        if "developer" not in template:
            for message in checked:
                if message["role"] == "developer":
                    message["role"] = "system"
        return TemplateInput(
            template=template,
            messages=checked,
            tools=shown,
            variables={**self._named, **variables},
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )

    def _template(self, tools: Sequence[Mapping[str, Any]] | None) -> str:
        """The template for a conversation with those tools (None: without any)."""
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise BadModel(
                f"none of the model's chat templates {sorted(self._templates)} is called 'default'",
                "Name one so in the model's folder",
            )
        return self._templates[name]

    @cached_property
    def _longest_token(self) -> int:
        """Bytes of text that one id can stand for at most; 0 where nothing bounds them."""
        if self._backend.normalizer is not None or not _byte_level(self._backend):
            return 0
        added = self._backend.get_added_tokens_decoder().values()
        if any(token.lstrip or token.rstrip for token in added):
            return 0
        # A character of a byte-level token stands for a byte; added tokens are plain text.
        plain = max(map(len, self._backend.get_vocab(with_added_tokens=False)), default=0)
        return max([plain, *(len(token.content.encode()) for token in added)])

    def _decode_window(self, ids: list[int]) -> str:
        return self._decoded(ids, skip_special_tokens=True)

    def _decode_all(self, ids: list[int]) -> str:
        return self._decoded(ids, skip_special_tokens=False)

    def _decoded(self, ids: list[int], skip_special_tokens: bool) -> str:
        text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return cleaned(text) if self._clean_up else text


def _num_bytes(text: str) -> int:
    """Of a text in UTF-8."""
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise BadRequest(
            f"the text has half a surrogate pair at character {error.start}: {text[error.start]!r}",
            "Send valid Unicode",
        ) from None


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a folder or GGUF file, None when it has none (token prompts still work)."""
    if is_gguf(folder):
        return Tokenizer(folder)
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        log.info("no tokenizer in %s: prompts must be token ids", folder)
        return None
    return Tokenizer(folder)


def _bound_cache(backend: Backend) -> None:
    """Keep few encoded words, where the model keeps any."""
    resize = getattr(backend.model, "_resize_cache", None)
    if resize is not None:
        resize(WORDS_KEPT)


def _byte_level(backend: Backend) -> bool:
    """Every byte of a text is in exactly one token: nothing is dropped or rewritten before."""
    if backend.pre_tokenizer is None:
        return False
    description = json.loads(backend.pre_tokenizer.__getstate__())
    steps = description.get("pretokenizers", [description])
    kinds = {step["type"] for step in steps}
    removing = any(step.get("behavior") == "Removed" for step in steps)
    return "ByteLevel" in kinds and kinds <= {"ByteLevel", "Split", "Digits"} and not removing


def _check_variables(template: str, tools: Any, variables: dict[str, Any]) -> None:
    """Raise BadRequest for what the template would ignore or must not be given."""
    if tools and not re.search(r"\btools\b", template):
        raise _refused("tools", "the model's chat template has no place for tools")
    for name in variables:
        if name in RESERVED:
            raise _refused(VARIABLES, f"{name!r} is not a variable of the chat template")
        if not re.search(rf"\b{re.escape(name)}\b", template):
            raise _refused(VARIABLES, f"the model's chat template has no variable {name!r}")


def _refused(field: str, message: str) -> BadRequest:
    """The error of a field that the model has no place for."""
    error = BadRequest(message, "Leave it out")
    error.param = field
    return error
