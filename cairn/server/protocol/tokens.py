"""/tokenize, /detokenize, /tokenizer_info and /v1/models."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from cairn.server.protocol.chat import Messages, Tools, check_message_names
from cairn.server.protocol.explain import BadField
from cairn.server.protocol.fields import Fields, TokenId

CHAT_ONLY = ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")


class TokenizeRequest(Fields):
    """Body of /tokenize: a text, or a conversation with what its template reads.

    Attributes:
        prompt: a text.
        messages: a conversation.
        tools, chat_template_kwargs, add_generation_prompt, continue_final_message: as in
            ChatRequest; only with `messages`.
        add_special_tokens: the tokenizer adds its special tokens (the default); only with `prompt`.
        return_token_strs: the answer shows each token's text.
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
        count: how many.
        max_model_len: longest prompt with its output.
        tokens: the ids.
        token_strs: text of each.
    """

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class TokenizerInfo(Struct, frozen=True, kw_only=True):
    """What clients that encode by this server must know, as in tokenizer_config.json.

    Attributes:
        tokenizer_class: of Hugging Face's library.
        bos_token, eos_token, pad_token, unk_token: null where there is none.
        chat_template: null for a model that gets the plain one.
        model_max_length: longest prompt with its output.
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
    """What clients of our extensions want to know of a model.

    Attributes:
        page_size: slots of a page of the context.
        landmarks: each page ends in a landmark, which takes one slot.
        landmark_layers: layers whose selection can be reported.
        landmark_window: slots of their local window, 0 without such layers.
        max_selection_tokens: longest output whose selection is reported.
        chat_template: conversations are put in the model's own form, not in a plain one.
        images: messages may have images.
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
