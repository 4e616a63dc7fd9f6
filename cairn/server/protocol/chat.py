"""/v1/chat/completions: structs of the request, the response and its chunks."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from cairn.names import nearest
from cairn.server.protocol.common import (
    CACHED_ANYWAY,
    ELSEWHERE,
    ChoiceExtras,
    PromptScore,
    SamplingFields,
    Text,
    Usage,
)
from cairn.server.protocol.explain import LONGEST_NAME, BadField
from cairn.server.protocol.fields import (
    ConversationPart,
    Count,
    Fields,
    Refusable,
    no_effect,
    refused,
)
from cairn.types import KvTransferParams

TYPING_ERROR = 0.85
"""Similarity above which an unknown field of a message is reported as a misspelled one."""
NO_SOUNDS = "this server reads text and images only"
NO_FUNCTIONS = "it was replaced by tools and tool_choice"
FunctionName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]


class TextPart(ConversationPart, tag_field="type", tag="text"):
    """Text part of a message."""

    text: str


class MediaUrl(ConversationPart):
    """URL of an image or a video: a data URL, or one that the server allows."""

    url: str
    detail: Annotated[Any, no_effect("the model's processor chooses the size")] = None


class ImagePart(ConversationPart, tag_field="type", tag="image_url"):
    """Image part of a message, for models with a vision encoder."""

    image_url: MediaUrl | str


class VideoPart(ConversationPart, tag_field="type", tag="video_url"):
    """Video part of a message: data:video/jpeg;base64 with comma-separated JPEG frames."""

    video_url: MediaUrl | str


class AudioPart(ConversationPart, tag_field="type", tag="input_audio"):
    """Audio part of a message; refused."""

    input_audio: Annotated[Refusable, refused(NO_SOUNDS)]


class FilePart(ConversationPart, tag_field="type", tag="file"):
    """File part of a message; refused."""

    file: Annotated[Refusable, refused(NO_SOUNDS)]


Content = str | list[TextPart | ImagePart | VideoPart | AudioPart | FilePart]


class SystemMessage(ConversationPart, tag_field="role", tag="system"):
    """System message."""

    content: Content
    name: str | None = None


class DeveloperMessage(ConversationPart, tag_field="role", tag="developer"):
    """OpenAI's newer name of the system message. The chat template gets role `system`."""

    content: Content
    name: str | None = None


class UserMessage(ConversationPart, tag_field="role", tag="user"):
    """User message."""

    content: Content
    name: str | None = None


class FunctionCall(ConversationPart):
    """The function of an earlier call. `arguments` is JSON text or an object; malformed text is
    passed to the chat template unchanged."""

    name: str
    arguments: Any = None


class ToolCall(ConversationPart, kw_only=True):
    """An earlier call of the assistant. The tool message with the result refers to its id."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall

    def __post_init__(self) -> None:
        ConversationPart.__post_init__(self)
        self.type = "function"


class AssistantMessage(ConversationPart, tag_field="role", tag="assistant"):
    """Message of the assistant. Content is null in a message of calls only.

    Attributes:
        reasoning_content, reasoning: its reasoning, under either name, for templates that read
            `reasoning_content`.
    """

    content: Content | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: Annotated[Refusable, refused("pass what the assistant said as content", "")] = None
    audio: Annotated[Refusable, refused(NO_SOUNDS)] = None
    function_call: Annotated[Refusable, refused("it was replaced by tool_calls")] = None
    annotations: Annotated[Any, no_effect("no template reads them")] = None


class ToolMessage(ConversationPart, tag_field="role", tag="tool"):
    """Result of a tool call; `name` is the function's."""

    content: Content | None = None
    tool_call_id: str | None = None
    name: str | None = None


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


class FunctionDefinition(Fields):
    """A function that the model may call.

    Attributes:
        name: name of the function.
        description, parameters: description and JSON schema of the arguments, for the template.
        strict: constrain the arguments to the schema. A `tool_choice` that requires a call always
            does.
    """

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: Annotated[Any, no_effect(CACHED_ANYWAY)] = None


class Tool(Fields):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition
    cache_control: Annotated[Any, no_effect(CACHED_ANYWAY)] = None


class FunctionChoice(Fields):
    """Name of the function to call."""

    name: FunctionName


class NamedTool(Fields):
    """A `tool_choice` of one function."""

    type: Literal["function"]
    function: FunctionChoice


_MESSAGES = (SystemMessage, DeveloperMessage, UserMessage, AssistantMessage, ToolMessage)
_MESSAGE_FIELDS = frozenset(
    field.encode_name for struct in _MESSAGES for field in msgspec.structs.fields(struct)
) | {"role"}


class _Names(Struct):
    """Messages as dicts, to check the names of their fields."""

    messages: list[dict[str, msgspec.Raw]] | None = None


def check_message_names(body: bytes) -> None:
    """Raise BadField for a field of a message that looks like a misspelled known one."""
    for i, message in enumerate(msgspec.json.decode(body, type=_Names).messages or ()):
        for name in message.keys() - _MESSAGE_FIELDS:
            close = _mistyped(name) if len(name) <= LONGEST_NAME else None
            if close is not None:
                path = f"messages[{i}].{name}"
                raise BadField(
                    path, f"{path} is not a field of this request", f"Did you mean {close!r}?"
                )


@lru_cache(maxsize=1000)
def _mistyped(name: str) -> str | None:
    return nearest(name, _MESSAGE_FIELDS, TYPING_ERROR)


ToolChoice = Literal["none", "auto", "required"] | NamedTool
Messages = Annotated[list[Message], Meta(min_length=1)]
Tools = Annotated[list[Tool], Meta(max_length=128)]


class ChatRequest(SamplingFields, kw_only=True):
    """Body of /v1/chat/completions; see SamplingFields for the rest.

    Attributes:
        messages: the conversation, oldest message first.
        max_completion_tokens, max_tokens: maximum number of generated tokens; only one of the two.
            Default: as many as fit the context.
        logprobs: report the log-probability of each generated token.
        top_logprobs: number of alternatives to report per token.
        tool_choice: "none", "auto" (the default with tools), "required" or a function.
        parallel_tool_calls: false ends the output after the first call.
        tools: functions that the model may call.
        reasoning_effort: passed to a chat template that reads `reasoning_effort`. "none" also sets
            `enable_thinking` to false in a template that reads it.
        include_reasoning: false omits the reasoning from the response.
        separate_reasoning: false leaves the reasoning in the content.
        chat_template_kwargs: further variables of the chat template.
        documents: the template variable `documents`, as in vLLM.
        add_generation_prompt: render the beginning of the assistant's message; the default unless
            `continue_final_message` is set.
        continue_final_message: continue the last message, which has to be the assistant's.
    """

    messages: Messages
    max_completion_tokens: Count | None = None
    max_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0)] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    metadata: Annotated[dict[str, Any] | None, no_effect(ELSEWHERE)] = None
    store: Annotated[bool | None, no_effect(ELSEWHERE)] = None
    service_tier: Annotated[str | None, no_effect(ELSEWHERE)] = None
    safety_identifier: Annotated[str | None, no_effect(ELSEWHERE)] = None
    prompt_cache_key: Annotated[str | None, no_effect(CACHED_ANYWAY)] = None
    prompt_cache_retention: Annotated[
        str | None, no_effect("pages are kept as long as there is room")
    ] = None
    prompt_cache_options: Annotated[dict[str, Any] | None, no_effect(CACHED_ANYWAY)] = None
    modalities: Annotated[list[Literal["text"]] | None, no_effect("text is all that is served")] = (
        None
    )
    audio: Annotated[Refusable, refused("this server writes text only")] = None
    functions: Annotated[Refusable, refused(NO_FUNCTIONS, [])] = None
    function_call: Annotated[Refusable, refused(NO_FUNCTIONS, "none")] = None
    prediction: Annotated[Refusable, refused("predicted outputs are not built")] = None
    reasoning_effort: Text | None = None
    verbosity: Annotated[str | None, no_effect("no template has such a control")] = None
    web_search_options: Annotated[Refusable, refused("the server searches nothing")] = None
    moderation: Annotated[Refusable, refused("the server moderates nothing")] = None

    chat_template: Annotated[Refusable, refused("the model's own template is used")] = None
    echo: Annotated[Refusable, refused("/v1/completions repeats its prompt", False)] = None
    add_special_tokens: Annotated[
        Refusable, refused("the chat template writes the special tokens", False)
    ] = None
    best_of: Annotated[Refusable, refused("ask for n continuations and choose", 1)] = None
    stream_reasoning: Annotated[bool | None, no_effect("reasoning is streamed")] = None

    @classmethod
    def check_body(cls, body: bytes) -> None:
        """See Fields."""
        check_message_names(body)


class TokenAlternative(Struct, frozen=True):
    """An alternative token at a position.

    Attributes:
        token: its text; an incomplete character is U+FFFD.
        logprob: natural logarithm of its probability; -9999 for a probability of 0.
        bytes: its bytes.
    """

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Struct, frozen=True):
    """A generated token with its most likely alternatives, which may include it."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TokenAlternative]


class ChatLogprobs(Struct, frozen=True):
    """One entry per generated token."""

    content: list[TokenLogprob]
    refusal: None = None


class GeneratedFunction(Struct, frozen=True):
    """The function of a generated call; `arguments` is JSON text."""

    name: str
    arguments: str


class GeneratedCall(Struct, frozen=True, tag_field="type", tag="function"):
    """A generated tool call."""

    id: str
    function: GeneratedFunction


class ChatAnswer(Struct, frozen=True, kw_only=True):
    """The generated message of the assistant."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[GeneratedCall] | UnsetType = UNSET


FinishReason = Literal["stop", "length", "tool_calls"]


class ChatChoice(Struct, frozen=True):
    """One of the `n` outputs."""

    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET
    cairn: ChoiceExtras | UnsetType = UNSET


class ChatResponse(Struct, frozen=True, kw_only=True):
    """The whole response."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[PromptScore] | UnsetType = UNSET
    system_fingerprint: None = None
    kv_transfer_params: KvTransferParams | UnsetType = UNSET


class FunctionFragment(Struct, frozen=True, omit_defaults=True):
    """Name of a called function, or a fragment of its arguments."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class CallFragment(Struct, frozen=True):
    """A fragment of the call at `index`. The first one has `id` and `type`."""

    index: int
    function: FunctionFragment
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(Struct, frozen=True):
    """The part of the message in a chunk."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallFragment] | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True):
    """The part of one choice in a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    cairn: ChoiceExtras | UnsetType = UNSET


class ChatChunk(Struct, frozen=True, kw_only=True):
    """One server-sent event of a streamed response."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    system_fingerprint: None = None
