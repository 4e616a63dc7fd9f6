"""/v1/responses: structs of the request, the response and its events."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from cairn.server.protocol.chat import FunctionName
from cairn.server.protocol.common import (
    CACHED_ANYWAY,
    ELSEWHERE,
    JsonObjectFormat,
    JsonSchema,
    Temperature,
    Text,
    TextFormat,
)
from cairn.server.protocol.explain import BadField
from cairn.server.protocol.fields import (
    ConversationPart,
    Count,
    Fields,
    Refusable,
    no_effect,
    refused,
)
from cairn.types import KvTransferParams

KEPT = "this server keeps nothing: send the whole conversation as input"


class InputText(ConversationPart, tag_field="type", tag="input_text"):
    """Text part of an input message."""

    text: str


class OutputText(ConversationPart, tag_field="type", tag="output_text"):
    """Text part of a message of the assistant."""

    text: str


class InputImage(ConversationPart, tag_field="type", tag="input_image"):
    """Image part of an input message, for models with a vision encoder."""

    image_url: str | None = None
    file_id: Annotated[Refusable, refused("this server keeps no files")] = None
    detail: Annotated[Any, no_effect("the model's processor chooses the size")] = None

    def __post_init__(self) -> None:
        ConversationPart.__post_init__(self)
        if self.image_url is None:
            raise BadField("image_url", "an image needs an image_url")


class InputMessage(ConversationPart, tag_field="type", tag="message"):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | OutputText | InputImage]


class InputCall(ConversationPart, tag_field="type", tag="function_call"):
    """An earlier function call of the assistant."""

    call_id: str
    name: str
    arguments: Any = None


class CallOutput(ConversationPart, tag_field="type", tag="function_call_output"):
    """The result of a function call."""

    call_id: str
    output: str | list[InputText | InputImage]


class ReasoningText(ConversationPart, tag_field="type", tag="reasoning_text"):
    """Text part of a reasoning item."""

    text: str


class Reasoning(ConversationPart, tag_field="type", tag="reasoning"):
    """Reasoning of an earlier response, for templates that read `reasoning_content`."""

    content: list[ReasoningText] | None = None


Item = InputMessage | InputCall | CallOutput | Reasoning


class FlatTool(Fields):
    """A function that the model may call."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FlatChoice(Fields):
    """A `tool_choice` of one function."""

    type: Literal["function"]
    name: FunctionName


class FlatSchemaFormat(JsonSchema, tag_field="type", tag="json_schema"):
    """Output in JSON that follows a schema."""


class TextOptions(Fields):
    """Options of the output text."""

    format: TextFormat | JsonObjectFormat | FlatSchemaFormat | None = None
    verbosity: Annotated[str | None, no_effect("no template has such a control")] = None


class ReasoningOptions(Fields):
    """Reasoning effort; see ChatRequest.reasoning_effort."""

    effort: Text | None = None
    summary: Annotated[str | None, no_effect("reasoning is reported in full")] = None
    generate_summary: Annotated[str | None, no_effect("reasoning is reported in full")] = None


class ResponsesRequest(Fields, kw_only=True):
    """Body of /v1/responses.

    Attributes:
        input: a user's message, or the conversation as a list of items.
        instructions: the system prompt.
        max_output_tokens: maximum number of generated tokens. Default: as many as fit the context.
        tools, tool_choice, parallel_tool_calls, temperature, top_p: as in ChatRequest.
        text: `format` is ChatRequest.response_format, with the fields of a schema at the top level.
        stream: send the response in pieces, as server-sent events.
        kv_transfer_params: as in ChatRequest; sent by routers of disaggregated prefill.
    """

    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1)]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    tools: list[FlatTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    stream: bool | None = None
    kv_transfer_params: KvTransferParams | None = None
    previous_response_id: Annotated[Refusable, refused(KEPT)] = None
    conversation: Annotated[Refusable, refused(KEPT)] = None
    prompt: Annotated[Refusable, refused(KEPT)] = None
    background: Annotated[Refusable, refused("an answer is sent while it is asked for")] = None
    include: Annotated[Any, no_effect("all there is is sent")] = None
    truncation: Annotated[str | None, no_effect("no input is cut")] = None
    stream_options: Annotated[Any, no_effect("no padding is ever sent")] = None
    max_tool_calls: Annotated[Any, no_effect("the server calls no tools itself")] = None
    store: Annotated[bool | None, no_effect(ELSEWHERE)] = None
    metadata: Annotated[dict[str, Any] | None, no_effect(ELSEWHERE)] = None
    user: Annotated[str | None, no_effect(ELSEWHERE)] = None
    service_tier: Annotated[str | None, no_effect(ELSEWHERE)] = None
    safety_identifier: Annotated[str | None, no_effect(ELSEWHERE)] = None
    prompt_cache_key: Annotated[str | None, no_effect(CACHED_ANYWAY)] = None
    prompt_cache_options: Annotated[dict[str, Any] | None, no_effect(CACHED_ANYWAY)] = None
    context_management: Annotated[Any, no_effect("the whole conversation is read")] = None
    top_logprobs: Annotated[
        Refusable, refused("log-probabilities come from /v1/chat/completions", 0)
    ] = None
    moderation: Annotated[Refusable, refused("the server moderates nothing")] = None
    prompt_cache_retention: Annotated[
        str | None, no_effect("pages are kept as long as there is room")
    ] = None


class ResponsesUsage(Struct, frozen=True):
    """Token counts of a request."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponsesAnswer(Struct, frozen=True, kw_only=True):
    """The response, complete or in progress.

    Attributes:
        status: "in_progress", "completed", or "incomplete" if it reached the token limit.
        output: reasoning, message and function call items.
    """

    id: str
    object: Literal["response"] = "response"
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete"]
    incomplete_details: dict[str, str] | None = None
    error: None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: None = None
    store: bool = False
    temperature: float | None = None
    tool_choice: Any = "auto"
    tools: list[dict[str, Any]]
    top_p: float | None = None
    usage: ResponsesUsage | None = None
    metadata: dict[str, Any] = {}
    kv_transfer_params: KvTransferParams | UnsetType = UNSET


class ResponsesEvent(Struct, frozen=True, omit_defaults=True):
    """A server-sent event; its fields depend on `type`."""

    type: str
    sequence_number: int
    response: ResponsesAnswer | None = None
    output_index: int | None = None
    content_index: int | None = None
    item_id: str | None = None
    item: dict[str, Any] | None = None
    part: dict[str, Any] | None = None
    delta: str | None = None
    text: str | None = None
    name: str | None = None
    arguments: str | None = None
    logprobs: list[Any] | None = None
    code: str | None = None
    message: str | None = None
    param: str | None = None
