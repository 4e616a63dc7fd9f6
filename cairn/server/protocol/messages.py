"""/v1/messages: structs of the request, the response and its events (Anthropic's API)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from cairn.server.protocol.chat import FunctionName
from cairn.server.protocol.common import CACHED_ANYWAY, ELSEWHERE, Share, StopText, Text
from cairn.server.protocol.fields import (
    ConversationPart,
    Count,
    Fields,
    Refusable,
    TokenId,
    no_effect,
    refused,
)
from cairn.types import KvTransferParams

NO_SERVER_TOOLS = "this server runs no tools: describe yours with an input_schema"
Cache = Annotated[dict[str, Any] | None, no_effect(CACHED_ANYWAY)]


class TextBlock(ConversationPart, tag_field="type", tag="text"):
    """Text of a turn."""

    text: str
    cache_control: Cache = None
    citations: Annotated[Any, no_effect("no template reads them")] = None


class SystemBlock(ConversationPart):
    """Text of the system prompt. `type` is a plain field, because msgspec does not require the tag
    of a struct outside of a union."""

    type: Literal["text"]
    text: str
    cache_control: Cache = None
    citations: Annotated[Any, no_effect("no template reads them")] = None


class Base64Source(ConversationPart, tag_field="type", tag="base64"):
    """A base64-encoded image file."""

    data: str
    media_type: str | None = None

    @property
    def as_url(self) -> str:
        """The image as a data URL."""
        return f"data:{self.media_type or 'image/png'};base64,{self.data}"


class UrlSource(ConversationPart, tag_field="type", tag="url"):
    """The URL of an image, which the server has to allow."""

    url: str

    @property
    def as_url(self) -> str:
        """The URL."""
        return self.url


class ImageBlock(ConversationPart, tag_field="type", tag="image"):
    """An image, for models with a vision encoder."""

    source: Base64Source | UrlSource
    cache_control: Cache = None


class ToolUseBlock(ConversationPart, tag_field="type", tag="tool_use"):
    """An earlier tool call of the assistant."""

    id: str
    name: str
    input: Any = None
    cache_control: Cache = None


class ToolResultBlock(ConversationPart, tag_field="type", tag="tool_result"):
    """The result of a tool call."""

    tool_use_id: str
    content: str | list[TextBlock | ImageBlock] | None = None
    is_error: Annotated[bool | None, no_effect("the text says what went wrong")] = None
    cache_control: Cache = None


class ThinkingBlock(ConversationPart, tag_field="type", tag="thinking"):
    """Reasoning of an earlier turn, for templates that read `reasoning_content`."""

    thinking: str
    signature: Annotated[str | None, no_effect("templates read the answer")] = None


class HiddenThinkingBlock(ConversationPart, tag_field="type", tag="redacted_thinking"):
    """Encrypted reasoning of an earlier turn; ignored."""

    data: Annotated[str, no_effect("templates read the answer")]


class SystemTurn(ConversationPart, tag_field="role", tag="system"):
    """System message within the conversation."""

    content: str | list[SystemBlock]


class UserTurn(ConversationPart, tag_field="role", tag="user"):
    """Turn of the user, with the results of tool calls."""

    content: str | list[TextBlock | ImageBlock | ToolResultBlock]


class AssistantTurn(ConversationPart, tag_field="role", tag="assistant"):
    """Turn of the assistant: text, reasoning and tool calls."""

    content: str | list[TextBlock | ImageBlock | ToolUseBlock | ThinkingBlock | HiddenThinkingBlock]


Turn = SystemTurn | UserTurn | AssistantTurn


class AnthropicTool(Fields):
    """A tool that the model may call, with a JSON schema of its input."""

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
    """Common fields of `tool_choice`."""

    disable_parallel_tool_use: bool | None = None


class AutoChoice(_Choice, tag_field="type", tag="auto"):
    """The model decides whether to call tools."""


class AnyChoice(_Choice, tag_field="type", tag="any"):
    """The model has to call a tool."""


class ToolChoice(_Choice, tag_field="type", tag="tool", kw_only=True):
    """The model has to call the tool `name`."""

    name: FunctionName


class NoChoice(_Choice, tag_field="type", tag="none"):
    """The model must not call tools."""


AnthropicChoice = AutoChoice | AnyChoice | ToolChoice | NoChoice


class SchemaOutput(Fields):
    """Output in JSON that follows a schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Fields):
    """Options of the output.

    Attributes:
        effort: see ChatRequest.reasoning_effort.
        format: format of the text.
    """

    effort: Text | None = None
    format: SchemaOutput | None = None


class Thinking(Fields):
    """Whether the model reasons. "disabled" sets the template's variable for it, if there is one;
    otherwise the template decides."""

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
        messages: the conversation, oldest turn first. A last turn of the assistant is continued.
        max_tokens: maximum number of generated tokens.
        system: the system prompt.
        tools, tool_choice: tools that the model may or has to call.
        output_config: reasoning effort, and a JSON schema of the output.
        stop_sequences: strings that end the output.
        temperature, top_p, top_k: as in ChatRequest.
        stream: send the response in pieces, as server-sent events.
        min_tokens, kv_transfer_params: as in ChatRequest; sent by routers of disaggregated prefill.
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


class TextContent(Struct, frozen=True, tag_field="type", tag="text"):
    """Text of the response."""

    text: str


class ThinkingContent(Struct, frozen=True, tag_field="type", tag="thinking"):
    """Reasoning of the response."""

    thinking: str
    signature: str = ""


class ToolUseContent(Struct, frozen=True, tag_field="type", tag="tool_use"):
    """A generated tool call. `input` is empty if the call was truncated; arguments that are not a
    JSON object are in `input` as the text `arguments`."""

    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(Struct, frozen=True):
    """Token counts of a request; `input_tokens` excludes cached tokens."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageResponse(Struct, frozen=True, kw_only=True):
    """The whole response. The first event of a stream has one without content."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ThinkingContent | TextContent | ToolUseContent]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    kv_transfer_params: KvTransferParams | UnsetType = UNSET


class MessageEvent(Struct, frozen=True, omit_defaults=True):
    """A server-sent event; its fields depend on `type`."""

    type: str
    message: MessageResponse | None = None
    index: int | None = None
    content_block: dict[str, Any] | None = None
    delta: dict[str, Any] | None = None
    usage: MessageUsage | None = None
    error: dict[str, Any] | None = None


class TokenCount(Struct, frozen=True):
    """Number of tokens of a conversation with its tools."""

    input_tokens: int
