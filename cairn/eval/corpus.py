"""Samples excerpts from a corpus."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path

from cairn.engine.tokenizer import Tokenizer
from cairn.errors import BadRequest
from cairn.eval.haystack import library_texts, read_texts
from cairn.llm import LLM


def tokenizer_of(llm: LLM) -> Tokenizer:
    """The model's tokenizer.

    Raises:
        BadRequest: the model has none.
    """
    tokenizer = llm.engine.core.tokenizer
    if tokenizer is None:
        raise BadRequest("this model has no tokenizer", "This evaluation reads text")
    return tokenizer


def excerpts(
    texts: Sequence[Path], tokenizer: Tokenizer, length: int, samples: int
) -> list[array[int]]:
    """Take `samples` excerpts of `length` tokens, evenly spaced over the start of a corpus.

    Excerpts overlap only if the corpus has fewer than `samples * length` tokens. Texts are
    concatenated without separators or special tokens.

    Args:
        texts: files and folders; empty for the standard library's sources.
        tokenizer: the model's tokenizer.
        length: tokens per excerpt.
        samples: number of excerpts.

    Raises:
        BadRequest: the corpus is shorter than one excerpt, or a path contains no text.
    """
    ids = array("q")
    for text in read_texts(texts) if texts else library_texts():
        ids.extend(tokenizer.encode(text, add_special_tokens=False))
        if len(ids) >= length * samples:
            break
    if len(ids) < length:
        raise BadRequest(
            f"the text holds {len(ids)} tokens, fewer than {length}", "Give more of it with --text"
        )
    room = min(len(ids), length * samples) - length
    starts = [room * i // max(1, samples - 1) for i in range(samples)]
    return [ids[start : start + length] for start in starts]
