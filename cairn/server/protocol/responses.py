"""/v1/responses: OpenAI's newer form of a chat request, of its answer and of its stream."""

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
    Count,
    Fields,
    History,
    Refusable,
    no_effect,
    refused,
)
from cairn.types import KvTransferParams

KEPT = "this server keeps nothing: send the whole conversation as input"


class InputText(History, tag_field="type", tag="input_text"):
    """Text part of an input message."""

    text: str


class OutputText(History, tag_field="type", tag="output_text"):
    """A piece of what the assistant said."""

    text: str


class InputImage(History, tag_field="type", tag="input_image"):
    """An image, for models that see."""

    image_url: str | None = None
    file_id: Annotated[Refusable, refused("this server keeps no files")] = None
    detail: Annotated[Any, no_effect("the model's processor chooses the size")] = None

    def __post_init__(self) -> None:
        History.__post_init__(self)
        if self.image_url is None:
            raise BadField("image_url", "an image needs an image_url")


class InputMessage(History, tag_field="type", tag="message"):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | OutputText | InputImage]


class InputCall(History, tag_field="type", tag="function_call"):
    """A call that the assistant made."""

    call_id: str
    name: str
    arguments: Any = None


class CallOutput(History, tag_field="type", tag="function_call_output"):
    """What a function answered."""

    call_id: str
    output: str | list[InputText | InputImage]


class ReasoningText(History, tag_field="type", tag="reasoning_text"):
    """A piece of what the assistant thought."""

    text: str


class Reasoning(History, tag_field="type", tag="reasoning"):
    """Reasoning of the assistant, sent back; for templates that read `reasoning_content`."""

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
    """Names the function to call."""

    type: Literal["function"]
    name: FunctionName


class FlatSchemaFormat(JsonSchema, tag_field="type", tag="json_schema"):
    """JSON that follows a schema."""


class TextOptions(Fields):
    """What the text looks like."""

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
        instructions: what the assistant is told first.
        max_output_tokens: none: as many as fit.
        tools, tool_choice, parallel_tool_calls, temperature, top_p: as in ChatRequest.
        text: its `format` is response_format's, without the inner object of a schema.
        stream: send the answer piece by piece, as server-sent events.
        kv_transfer_params: as in ChatRequest; routers in front of two engines send them.
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
    """Tokens of a request."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponsesAnswer(Struct, frozen=True, kw_only=True):
    """The answer, as far as it is there.

    Attributes:
        status: "in_progress", "completed", or "incomplete" at the limit of its tokens.
        output: messages and function calls.
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
    """A server-sent event, named by its `type`; which fields it has depends on that."""

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
