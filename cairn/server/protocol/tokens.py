"""Structs of /tokenize, /detokenize, /tokenizer_info and /v1/models."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from cairn.server.protocol.chat import Messages, Tools, check_message_names
from cairn.server.protocol.explain import BadField
from cairn.server.protocol.fields import Fields, TokenId

CHAT_ONLY = ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")


class TokenizeRequest(Fields):
    """Body of /tokenize: a text, or a conversation.

    Attributes:
        prompt: a text.
        messages: a conversation.
        tools, chat_template_kwargs, add_generation_prompt, continue_final_message: as in
            ChatRequest; only with `messages`.
        add_special_tokens: add the tokenizer's special tokens (default true); only with `prompt`.
        return_token_strs: return the text of each token.
        model: name of the served model.
    """

    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    model: str | None = None

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise BadField("prompt", "give either prompt or messages")
        only = ("add_special_tokens",) if self.prompt is None else CHAT_ONLY
        other = "prompt" if self.prompt is None else "messages"
        for name in only:
            if getattr(self, name) is not None:
                raise BadField(name, f"{name} goes with {other} only", "Leave it out")

    @classmethod
    def check_body(cls, body: bytes) -> None:
        """See Fields."""
        check_message_names(body)


class TokenizeResponse(Struct, frozen=True):
    """Token ids of a prompt.

    Attributes:
        count: number of tokens.
        max_model_len: maximum length of prompt and output in tokens.
        tokens: token ids.
        token_strs: text of each token.
    """

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class TokenizerInfo(Struct, frozen=True, kw_only=True):
    """Properties of the tokenizer, with the names of tokenizer_config.json.

    Attributes:
        tokenizer_class: class of transformers.
        bos_token, eos_token, pad_token, unk_token: special tokens; null if there is none.
        chat_template: null if the model uses the built-in plain one.
        model_max_length: maximum length of prompt and output in tokens.
    """

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None
    model_max_length: int


class DetokenizeRequest(Fields):
    """Body of /detokenize."""

    tokens: Annotated[list[TokenId], Meta(min_length=1)]
    model: str | None = None


class DetokenizeResponse(Struct, frozen=True):
    """Text of token ids."""

    prompt: str


class ModelFacts(Struct, frozen=True):
    """Properties of a model for clients of this server's extensions.

    Attributes:
        page_size: slots per page.
        landmarks: the last slot of each page is a landmark.
        landmark_layers: layers whose selection of pages can be reported.
        landmark_window: slots of their local window; 0 without such layers.
        max_selection_tokens: maximum output length with a report of selected pages.
        chat_template: the model has a chat template of its own.
        images: messages may contain images.
    """

    page_size: int
    landmarks: bool
    landmark_layers: tuple[int, ...]
    landmark_window: int
    max_selection_tokens: int
    chat_template: bool
    images: bool = False


class ModelCard(Struct, frozen=True, kw_only=True):
    """A served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    max_model_len: int
    owned_by: Literal["cairn"] = "cairn"
    cairn: ModelFacts


class ModelList(Struct, frozen=True, kw_only=True):
    """The served model, once for each of its names."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
