"""/v1/messages: Anthropic's form of a chat request, of its answer and of its stream."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from cairn.server.protocol.chat import FunctionName
from cairn.server.protocol.common import CACHED_ANYWAY, ELSEWHERE, Share, StopText, Text
from cairn.server.protocol.fields import (
    Count,
    Fields,
    History,
    Refusable,
    TokenId,
    no_effect,
    refused,
)
from cairn.types import KvTransferParams

NO_SERVER_TOOLS = "this server runs no tools: describe yours with an input_schema"
Cache = Annotated[dict[str, Any] | None, no_effect(CACHED_ANYWAY)]


class TextBlock(History, tag_field="type", tag="text"):
    """A piece of text."""

    text: str
    cache_control: Cache = None
    citations: Annotated[Any, no_effect("no template reads them")] = None


class SystemBlock(History):
    """A piece of the system prompt. Its type is a field: the tag of a struct that is in no union
    may be left out, which the description of the API does not allow."""

    type: Literal["text"]
    text: str
    cache_control: Cache = None
    citations: Annotated[Any, no_effect("no template reads them")] = None


class Base64Source(History, tag_field="type", tag="base64"):
    """An image file, encoded in base64."""

    data: str
    media_type: str | None = None

    @property
    def as_url(self) -> str:
        """A data URL of it."""
        return f"data:{self.media_type or 'image/png'};base64,{self.data}"


class UrlSource(History, tag_field="type", tag="url"):
    """An image at a URL that the server allows."""

    url: str

    @property
    def as_url(self) -> str:
        """The URL."""
        return self.url


class ImageBlock(History, tag_field="type", tag="image"):
    """An image, for models that see."""

    source: Base64Source | UrlSource
    cache_control: Cache = None


class ToolUseBlock(History, tag_field="type", tag="tool_use"):
    """A call that the assistant made."""

    id: str
    name: str
    input: Any = None
    cache_control: Cache = None


class ToolResultBlock(History, tag_field="type", tag="tool_result"):
    """What a tool answered."""

    tool_use_id: str
    content: str | list[TextBlock | ImageBlock] | None = None
    is_error: Annotated[bool | None, no_effect("the text says what went wrong")] = None
    cache_control: Cache = None


class ThinkingBlock(History, tag_field="type", tag="thinking"):
    """Thinking of the assistant, sent back; for templates that read `reasoning_content`."""

    thinking: str
    signature: Annotated[str | None, no_effect("templates read the answer")] = None


class HiddenThinkingBlock(History, tag_field="type", tag="redacted_thinking"):
    """Encrypted thinking of the assistant, sent back."""

    data: Annotated[str, no_effect("templates read the answer")]


class SystemTurn(History, tag_field="role", tag="system"):
    """Instructions of the operator."""

    content: str | list[SystemBlock]


class UserTurn(History, tag_field="role", tag="user"):
    """What the user says, and what tools answered."""

    content: str | list[TextBlock | ImageBlock | ToolResultBlock]


class AssistantTurn(History, tag_field="role", tag="assistant"):
    """What the assistant said, thought and called."""

    content: str | list[TextBlock | ImageBlock | ToolUseBlock | ThinkingBlock | HiddenThinkingBlock]


Turn = SystemTurn | UserTurn | AssistantTurn


class AnthropicTool(Fields):
    """A tool that the model may call; its input is described by a JSON schema."""

    name: FunctionName
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None
    type: Annotated[Any, refused(NO_SERVER_TOOLS, "custom")] = None
    cache_control: Cache = None
    input_examples: Annotated[Any, no_effect("no template reads them")] = None
    eager_input_streaming: Annotated[Any, no_effect("input is streamed while it is written")] = None
    allowed_callers: Annotated[Any, no_effect("the model alone calls tools")] = None
    defer_loading: Annotated[Refusable, refused("all tools are shown to the model", False)] = None


class _Choice(Fields):
    """What all choices of tools share."""

    disable_parallel_tool_use: bool | None = None


class AutoChoice(_Choice, tag_field="type", tag="auto"):
    """The model calls tools as it likes."""


class AnyChoice(_Choice, tag_field="type", tag="any"):
    """The model calls some tool."""


class ToolChoice(_Choice, tag_field="type", tag="tool", kw_only=True):
    """The model calls the tool of this name."""

    name: FunctionName


class NoChoice(_Choice, tag_field="type", tag="none"):
    """The model calls no tool."""


AnthropicChoice = AutoChoice | AnyChoice | ToolChoice | NoChoice


class SchemaOutput(Fields):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Fields):
    """What the answer is like.

    Attributes:
        effort: ChatRequest.reasoning_effort.
        format: the form of the text.
    """

    effort: Text | None = None
    format: SchemaOutput | None = None


class Thinking(Fields):
    """Whether the model reasons before it answers: "disabled" is passed to a template that has a
    variable for it; otherwise the template decides."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int | None, no_effect("max_tokens bounds thoughts and answer")] = None
    display: Annotated[str | None, no_effect("thoughts are shown")] = None


class CountRequest(Fields):
    """Body of /v1/messages/count_tokens; see MessagesRequest."""

    messages: Annotated[list[Turn], Meta(min_length=1)]
    model: str | None = None
    system: str | list[SystemBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Cache = None
    context_management: Annotated[Any, no_effect("the whole conversation is read")] = None
    mcp_servers: Annotated[Refusable, refused("the server calls no tools itself", [])] = None


class MessagesRequest(CountRequest, kw_only=True):
    """Body of /v1/messages.

    Attributes:
        messages: the conversation, oldest first; an assistant's last message is continued.
        max_tokens: at most this many tokens are generated.
        system: what the assistant is told first.
        tools, tool_choice: functions that the model may call.
        output_config: effort, and a JSON schema of the answer.
        stop_sequences: strings that end the output.
        temperature, top_p, top_k: as in ChatRequest.
        stream: send the answer piece by piece, as server-sent events.
        min_tokens, kv_transfer_params: as in ChatRequest; routers in front of two engines send
            them.
    """

    max_tokens: Count
    stop_sequences: list[StopText] | None = None
    temperature: Share | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    stream: bool | None = None
    min_tokens: TokenId | None = None
    kv_transfer_params: KvTransferParams | None = None
    metadata: Annotated[dict[str, Any] | None, no_effect(ELSEWHERE)] = None
    service_tier: Annotated[str | None, no_effect(ELSEWHERE)] = None
    inference_geo: Annotated[str | None, no_effect(ELSEWHERE)] = None
    container: Annotated[Refusable, refused("the server runs no code")] = None


class MadeText(Struct, frozen=True, tag_field="type", tag="text"):
    """Text of the answer."""

    text: str


class MadeThinking(Struct, frozen=True, tag_field="type", tag="thinking"):
    """What the model thought before the answer."""

    thinking: str
    signature: str = ""


class MadeToolUse(Struct, frozen=True, tag_field="type", tag="tool_use"):
    """A call of the answer; `input` is empty where it was cut off, and has what is no JSON object
    as the text `arguments`."""

    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(Struct, frozen=True):
    """Tokens of a request; `input_tokens` are those that came from no cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageResponse(Struct, frozen=True, kw_only=True):
    """The whole answer; at the beginning of a stream without content."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[MadeThinking | MadeText | MadeToolUse]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    kv_transfer_params: KvTransferParams | UnsetType = UNSET


class MessageEvent(Struct, frozen=True, omit_defaults=True):
    """A server-sent event, named by its `type`; which fields it has depends on that."""

    type: str
    message: MessageResponse | None = None
    index: int | None = None
    content_block: dict[str, Any] | None = None
    delta: dict[str, Any] | None = None
    usage: MessageUsage | None = None
    error: dict[str, Any] | None = None


class TokenCount(Struct, frozen=True):
    """Tokens of a conversation with its tools."""

    input_tokens: int
