"""/v1/completions: structs of the request, the response and its chunks."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from cairn.server.protocol.common import ChoiceExtras, PromptScore, SamplingFields, Usage
from cairn.server.protocol.explain import BadField
from cairn.server.protocol.fields import Refusable, TokenId, refused
from cairn.types import KvTransferParams

Prompt = Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]


class CompletionRequest(SamplingFields, kw_only=True):
    """Body of /v1/completions; see SamplingFields for the rest.

    Attributes:
        prompt: a text, token ids, or a list of either.
        max_tokens: maximum number of generated tokens. Default 16; 0 only with `echo`.
        echo: the output begins with the prompt, and `logprobs` includes its tokens.
        logprobs: report the log-probability of each token and of this many alternatives.
        add_special_tokens: add the tokenizer's special tokens to text prompts (default true).
    """

    prompt: str | Prompt
    max_tokens: TokenId | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0)] | None = None
    add_special_tokens: bool | None = None
    best_of: Annotated[Refusable, refused("ask for n continuations and choose", 1)] = None
    suffix: Annotated[Refusable, refused("the model continues text, it does not fill in", "")] = (
        None
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.best_of is not None and (self.n or 1) > self.best_of:
            raise BadField("best_of", f"best_of is {self.best_of}, less than n", "Leave it out")


class CompletionLogprobs(Struct, frozen=True):
    """Four lists with one entry per token.

    Attributes:
        tokens: texts; a token with an incomplete character is `bytes:\\\\xe2\\\\x82`.
        token_logprobs: natural logarithms; null for the first token of an echoed prompt.
        top_logprobs: text -> log-probability of the most likely tokens and the token itself; null
            for the first token of an echoed prompt.
        text_offset: offset of the token in the text of the choice.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


LegacyFinish = Literal["stop", "length"]


class CompletionChoice(Struct, frozen=True):
    """One of the `n` outputs of a prompt, or the new part of it in a chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: LegacyFinish | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[PromptScore] | UnsetType = UNSET
    cairn: ChoiceExtras | UnsetType = UNSET


class CompletionResponse(Struct, frozen=True, kw_only=True):
    """The whole response, or one server-sent event."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: None = None
    kv_transfer_params: KvTransferParams | UnsetType = UNSET
