"""The model's tokenizer: text to ids, ids to text piece by piece, and the chat template."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cairn.errors import BadModel, BadRequest

log = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
REPLACEMENT = "�"


class Tokenizer:
    """A thin face over a Hugging Face tokenizer. Repository code is never run.

    Args:
        folder: a model folder that holds tokenizer files.

    Raises:
        BadModel: the files cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer
        from transformers.utils import logging as hf_logging

        # The library warns that it does not know our model types; it only reads the tokenizer here.
        verbosity = hf_logging.get_verbosity()
        hf_logging.set_verbosity_error()
        try:
            self._hf = AutoTokenizer.from_pretrained(
                folder, trust_remote_code=False, local_files_only=True
            )
        except Exception as error:
            # Whatever the tokenizer library raises on a broken file, the user sees one line.
            raise BadModel(
                f"the tokenizer in {folder} cannot be read: {error}",
                "Check tokenizer.json, or remove it and pass prompt_token_ids",
            ) from error
        finally:
            hf_logging.set_verbosity(verbosity)
        self.eos_token_id: int | None = self._hf.eos_token_id

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, with the special tokens the tokenizer adds by itself."""
        ids: list[int] = self._hf.encode(text)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        text: str = self._hf.decode(ids, skip_special_tokens=True)
        return text

    def token_text(self, token: int) -> str:
        """Text of one id, special tokens shown."""
        text: str = self._hf.decode([token])
        return text

    def apply_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of a conversation, ready for the assistant's answer.

        A model without a chat template gets the plain one: each message's content on a line of
        its own after its role, then `assistant:`.
        """
        check_messages(messages)
        if getattr(self._hf, "chat_template", None):
            text: str = self._hf.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
            ids: list[int] = self._hf.encode(text, add_special_tokens=False)
            return ids
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return self.encode("".join(lines) + "assistant:")


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise BadRequest unless every message has a role and a content."""
    if not messages:
        raise BadRequest("messages is empty", "Give at least one message")
    for i, message in enumerate(messages):
        for key in ("role", "content"):
            if not isinstance(message, Mapping) or not isinstance(message.get(key), str):
                raise BadRequest(f"messages[{i}] needs a string {key!r}, not {message!r}")


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The folder's tokenizer, None when it has none (token prompts still work)."""
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        log.info("no tokenizer in %s: prompts must be token ids", folder)
        return None
    return Tokenizer(folder)


class Detokenizer:
    """Text of one output, token by token; the pieces joined are the text.

    Each piece is the difference of two decodings that start at a token border a little earlier,
    so that joins which depend on the neighbour (a leading space, a character of several tokens)
    come out right. An unfinished character waits for its last token.

    Args:
        tokenizer: gives the text of ids.
        prompt_tail: the last ids of the prompt, context of the first piece.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_tail: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt_tail)
        self._start = 0
        self._read = len(self._ids)
        self._before = tokenizer.decode(self._ids) if self._ids else ""

    def push(self, token: int) -> str:
        """The text that `token` settles; empty while a character is unfinished."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids[self._start :])
        if len(text) <= len(self._before) or text.endswith(REPLACEMENT):
            return ""
        return self._advance(text)

    def flush(self) -> str:
        """The rest, when no token follows: an unfinished character becomes a replacement sign."""
        if self._read == len(self._ids):
            return ""
        return self._advance(self._tokenizer.decode(self._ids[self._start :]))

    def _advance(self, text: str) -> str:
        piece = text[len(self._before) :]
        self._start = self._read
        self._read = len(self._ids)
        self._before = self._tokenizer.decode(self._ids[self._start : self._read])
        # Ids before the window are never looked at again.
        del self._ids[: self._start]
        self._read -= self._start
        self._start = 0
        return piece
