"""What chat and plain completions share: sampling fields, output formats, usage."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from msgspec import Meta, Struct

from cairn.server.protocol.fields import Count, Fields, Refusable, TokenId, no_effect, refused
from cairn.types import LayerSelection

Text = Annotated[str, Meta(min_length=1)]
StopText = Annotated[str, Meta(min_length=1, max_length=1024)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]]

IN_RESPONSE_FORMAT = "pass a schema as response_format, an expression as regex or a grammar as ebnf"
ELSEWHERE = "this server keeps nothing and serves every request alike"


class StreamOptions(Fields):
    """How to stream.

    Attributes:
        include_usage: a last chunk without choices carries the usage.
        continuous_usage_stats: every chunk carries the usage so far, all choices together.
        include_obfuscation: OpenAI's padding against traffic analysis.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Annotated[bool | None, no_effect("no padding is ever sent")] = None


class CairnOptions(Fields):
    """Extensions of this server.

    Attributes:
        selection: report which pages of the context each generated token's query read, per
            landmark layer. Needs a model with landmark layers, and `max_tokens`.
    """

    selection: bool = False


class TextFormat(Fields, tag_field="type", tag="text"):
    """Free text."""


class JsonObjectFormat(Fields, tag_field="type", tag="json_object"):
    """Any JSON object."""


class JsonSchema(Fields):
    """A JSON schema that the output follows, always strictly.

    Attributes:
        schema: the schema.
        name, description, strict: accepted for OpenAI's sake.
    """

    schema: dict[str, Any]
    name: Annotated[str | None, no_effect("the output follows the schema alone")] = None
    description: Annotated[str | None, no_effect("the output follows the schema alone")] = None
    strict: Annotated[bool | None, no_effect("the schema is always followed")] = None


class JsonSchemaFormat(Fields, tag_field="type", tag="json_schema"):
    """JSON that follows a schema."""

    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class SamplingFields(Fields):
    """Fields of every request that generates. Null means the default.

    Attributes:
        model: name of the served model; null: the one there is.
        max_tokens: at most this many tokens are generated.
        temperature: 0 always takes the most likely token.
        top_p: keep the smallest set of tokens whose mass reaches it.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        min_p: keep tokens with this share of the most likely one's mass.
        n: continuations of each prompt.
        seed: any 64-bit integer; the same seed gives the same answer.
        stop: one or more strings that end the output.
        stop_token_ids: token ids that end the output.
        ignore_eos: the model's end-of-sequence ids do not end the output.
        min_tokens: nothing ends the output before this many tokens.
        presence_penalty: subtracted once from every token already generated.
        frequency_penalty: subtracted per occurrence among the generated tokens.
        repetition_penalty: divides the logits of tokens in prompt or output.
        logit_bias: token id -> value added to its logit.
        response_format: what the output looks like: text, any JSON object, a JSON schema.
        regex: an expression that the whole output matches.
        ebnf: a grammar (Lark or GBNF) that the output follows.
        priority: smaller goes first.
        stream: send the answer piece by piece, as server-sent events.
        stream_options: of an answer that is streamed.
        cairn: extensions of this server.
    """

    model: str | None = None
    temperature: Temperature | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Share | None = None
    n: Count | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopText | list[StopText] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    min_tokens: TokenId | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[Bias, Meta(max_length=4096)] | None = None
    response_format: ResponseFormat | None = None
    regex: Text | None = None
    ebnf: Text | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cairn: CairnOptions | None = None
    guided_json: Annotated[Refusable, refused(IN_RESPONSE_FORMAT)] = None
    guided_regex: Annotated[Refusable, refused("pass the expression as regex")] = None
    guided_grammar: Annotated[Refusable, refused("pass the grammar as ebnf")] = None
    guided_choice: Annotated[Refusable, refused("pass the choices as regex: a|b")] = None
    structured_outputs: Annotated[Refusable, refused(IN_RESPONSE_FORMAT)] = None
    user: Annotated[str | None, no_effect(ELSEWHERE)] = None


class CachedTokens(Struct, frozen=True):
    """Prompt tokens by kind.

    Attributes:
        cached_tokens: taken from the prefix cache.
    """

    cached_tokens: int


class Usage(Struct, frozen=True):
    """Tokens of a request. Tokens of a prompt count once, whatever `n` is."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class ChoiceExtras(Struct, frozen=True):
    """Extensions on a choice.

    Attributes:
        selection: one entry per generated token, each one entry per landmark layer.
    """

    selection: list[tuple[LayerSelection, ...]]

    @classmethod
    def joined(cls, parts: Iterable[ChoiceExtras]) -> ChoiceExtras:
        """One from several that follow each other."""
        return cls([entry for part in parts for entry in part.selection])


class ErrorDetail(Struct, frozen=True):
    """Error object in OpenAI's form."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(Struct, frozen=True):
    """Body of every answer that is an error."""

    error: ErrorDetail
