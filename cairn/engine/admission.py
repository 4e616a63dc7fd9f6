"""Checks prompts and parameters against the model; called in the API process and in the engine.

No torch here: the API process imports it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cairn.errors import BadRequest, TooLong
from cairn.specs.vision import MediaSpec
from cairn.types import SamplingParams


@dataclass(frozen=True, slots=True)
class CoreShape:
    """What the core knows of the model.

    Attributes:
        vocab_size: user vocabulary.
        max_model_len: longest prompt with its output, in user tokens.
        eos_ids: ids that end an output.
        seed: base of the draws of requests without a seed.
        selects: some layer selects the pages that it reads.
        media: how images and videos enter prompts; None: the model reads text alone.
    """

    vocab_size: int
    max_model_len: int
    eos_ids: tuple[int, ...]
    seed: int
    selects: bool = False
    media: MediaSpec | None = None


def check(
    prompt: Sequence[int], params: SamplingParams, shape: CoreShape, has_tokenizer: bool
) -> None:
    """Check that a prompt with these parameters can be served.

    Raises:
        BadRequest: a prompt or parameters that this model can never serve.
        TooLong: the prompt and one output token (if any is asked for) exceed max_model_len.
    """
    _check_prompt(prompt, params, shape)
    _check_ids(params, shape)
    if params.stop and not has_tokenizer:
        raise BadRequest(
            f"stop is {params.stop!r}, but this model has no tokenizer", "Use stop_token_ids"
        )
    if params.grammar is not None and not has_tokenizer:
        raise BadRequest(
            f"a {params.grammar.kind} grammar was given, but this model has no tokenizer",
            "Leave the grammar out",
        )
    if params.selection and not shape.selects:
        raise BadRequest(
            "selection was asked for, but no layer of this model selects pages",
            "Leave it out: this model reads its whole context for every token",
        )


def stop_ids(params: SamplingParams, shape: CoreShape) -> tuple[int, ...]:
    """Unique ids that end an output under these parameters. A model may name an end-of-sequence id
    that it cannot produce."""
    eos_ids = () if params.ignore_eos else shape.eos_ids
    ids = dict.fromkeys((*eos_ids, *params.stop_token_ids))
    return tuple(token for token in ids if token < shape.vocab_size)


def longest_prompt(max_model_len: int, max_tokens: int | None) -> int:
    """Length in tokens of the longest prompt that leaves room for one output token, if any is asked
    for."""
    return max_model_len if max_tokens == 0 else max_model_len - 1


def _check_prompt(prompt: Sequence[int], params: SamplingParams, shape: CoreShape) -> None:
    vocab = shape.vocab_size
    if len(prompt) == 0:
        raise BadRequest("the prompt is empty", "Give at least one token")
    if len(prompt) > longest_prompt(shape.max_model_len, params.max_tokens):
        what = "it" if params.max_tokens == 0 else "prompt and output together"
        raise TooLong(
            f"the prompt has {len(prompt)} tokens, but {what} may have "
            f"{shape.max_model_len} (max_model_len)",
            "Shorten the prompt, or raise max_model_len or kv_cache_memory if the model "
            "and the memory allow it",
        )
    ids = np.frombuffer(prompt, dtype=np.intc) if isinstance(prompt, array) else None
    low, high = (min(prompt), max(prompt)) if ids is None else (int(ids.min()), int(ids.max()))
    if low < 0 or high >= vocab:
        bad = low if low < 0 else high
        raise BadRequest(f"prompt token id {bad} is out of range", f"Ids go from 0 to {vocab - 1}")


def _check_ids(params: SamplingParams, shape: CoreShape) -> None:
    vocab = shape.vocab_size
    for name, ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", params.logit_bias),
    ):
        for token in ids:
            if token >= vocab:
                raise BadRequest(
                    f"{name} has token id {token}, out of range", f"Ids go from 0 to {vocab - 1}"
                )
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if count is not None and count > vocab:
            raise BadRequest(
                f"{name} is {count}, but the vocabulary has {vocab} tokens",
                "Use -1 for the whole vocabulary",
            )
    if params.min_tokens and len(stop_ids(params, shape)) >= vocab:
        raise BadRequest(
            f"min_tokens is {params.min_tokens}, but every token id ends the output",
            "Leave some id out of stop_token_ids",
        )
