"""Structs that chats and completions share: sampling fields, output formats, usage, errors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from cairn.server.protocol.fields import (
    MAX_TOKENS,
    Count,
    Fields,
    Refusable,
    TokenId,
    no_effect,
    refused,
)
from cairn.types import KvTransferParams, LayerSelection

Text = Annotated[str, Meta(min_length=1)]
StopText = Annotated[str, Meta(min_length=1, max_length=1024)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]]

Schema = dict[str, Any] | str
Choices = Annotated[list[Text], Meta(min_length=1, max_length=1024)]

IN_RESPONSE_FORMAT = "pass a schema as response_format, an expression as regex or a grammar as ebnf"
OWN_SPACE = "the grammar allows the white space that JSON libraries write"
ONE_BACKEND = "all grammars are followed by one library"
NO_BEAMS = "outputs are sampled, without beams"
CACHED_ANYWAY = "equal prompts share pages anyway"
ELSEWHERE = "this server keeps nothing and serves every request alike"


class StreamOptions(Fields):
    """Options of a streamed response.

    Attributes:
        include_usage: the last chunk has the usage and no choices.
        continuous_usage_stats: every chunk has the usage so far, summed over choices.
        include_obfuscation: OpenAI's padding against traffic analysis; no effect.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Annotated[bool | None, no_effect("no padding is ever sent")] = None


class CairnOptions(Fields):
    """Extensions of this server.

    Attributes:
        selection: report the pages of the context that each generated token's query read, per
            landmark layer. Needs a model with landmark layers, and `max_tokens`.
    """

    selection: bool = False


class TextFormat(Fields, tag_field="type", tag="text"):
    """Free text."""


class JsonObjectFormat(Fields, tag_field="type", tag="json_object"):
    """Any JSON object."""


class JsonSchema(Fields):
    """A JSON schema that the output follows.

    Attributes:
        schema: the schema.
        name, description, strict: fields of OpenAI's API without effect; the schema is always
            enforced.
    """

    schema: dict[str, Any]
    name: Annotated[str | None, no_effect("the output follows the schema alone")] = None
    description: Annotated[str | None, no_effect("the output follows the schema alone")] = None
    strict: Annotated[bool | None, no_effect("the schema is always followed")] = None


class JsonSchemaFormat(Fields, tag_field="type", tag="json_schema"):
    """JSON that follows a schema."""

    json_schema: JsonSchema


class StructuredOutputs(Fields):
    """Constraint on the output, in vLLM's format. Exactly one of these fields may be set.

    Attributes:
        json: a JSON schema, as object or text.
        regex, grammar: as `regex` and `ebnf` of a request.
        choice: the output is one of these texts.
        json_object: true for any JSON object.
    """

    json: Schema | None = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    json_object: bool | None = None
    structural_tag: Annotated[Refusable, refused(IN_RESPONSE_FORMAT)] = None
    whitespace_pattern: Annotated[Refusable, refused(OWN_SPACE)] = None
    disable_any_whitespace: Annotated[Refusable, refused(OWN_SPACE, False)] = None
    disable_additional_properties: Annotated[
        Refusable, refused("say additionalProperties: false in the schema", False)
    ] = None
    disable_fallback: Annotated[bool | None, no_effect(ONE_BACKEND)] = None
    backend: Annotated[str | None, no_effect(ONE_BACKEND)] = None


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class SamplingFields(Fields):
    """Fields of every request that generates. Null means the default.

    Attributes:
        model: name of the served model.
        max_tokens: maximum number of generated tokens.
        temperature: sampling temperature; 0 for greedy decoding.
        top_p: sample from the smallest set of tokens whose probabilities sum to at least this.
        top_k: sample from the k most likely tokens; 0 or -1 for all.
        min_p: drop tokens whose probability is below this share of the most likely token's.
        n: number of outputs per prompt.
        seed: 64-bit seed of the sampling; the same seed gives the same output.
        stop: one or more strings that end the output.
        stop_token_ids: token ids that end the output.
        ignore_eos: the model's end-of-sequence ids do not end the output.
        skip_special_tokens: false includes special tokens in the text.
        include_stop_str_in_output: the text keeps the stop string or stop id that ended it.
        bad_words: texts that the output must not contain.
        min_tokens: minimum number of tokens before a stop condition applies.
        presence_penalty: subtracted from the logit of every token already generated.
        frequency_penalty: subtracted from a token's logit for each time it was generated.
        repetition_penalty: divides positive logits of tokens in prompt and output, and multiplies
            negative ones.
        logit_bias: token id -> value added to its logit.
        response_format: format of the output: text, any JSON object, or a JSON schema.
        regex: regular expression that the whole output matches.
        ebnf: grammar (Lark or GBNF) that the output follows.
        structured_outputs, guided_json, guided_regex, guided_choice, guided_grammar: the same
            constraints in vLLM's fields. At most one constraint may be given.
        return_token_ids: return the token ids of prompt and output.
        return_tokens_as_token_ids: log-probabilities name tokens by id, as `token_id:5`.
        prompt_logprobs: report the log-probabilities of each prompt token and of this many
            alternatives; not in streams.
        truncate_prompt_tokens: keep this many tokens at the end of the prompt; -1 for as many as
            fit.
        priority: requests with smaller values are scheduled first.
        kv_transfer_params: parameters of disaggregated prefill, in vLLM's format.
        stream: send the response in pieces, as server-sent events.
        stream_options: options of a streamed response.
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
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: Annotated[list[StopText], Meta(max_length=256)] | None = None
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
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0)] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] | None = None
    guided_decoding_backend: Annotated[str | None, no_effect(ONE_BACKEND)] = None
    guided_whitespace_pattern: Annotated[Refusable, refused(OWN_SPACE)] = None
    spaces_between_special_tokens: Annotated[
        bool | None, no_effect("texts are put together without spaces of their own")
    ] = None
    request_id: Annotated[str | None, no_effect("the header X-Request-Id names a request")] = None
    use_beam_search: Annotated[Refusable, refused(NO_BEAMS, False)] = None
    length_penalty: Annotated[Refusable, refused(NO_BEAMS, 1)] = None
    early_stopping: Annotated[Refusable, refused(NO_BEAMS, False)] = None
    allowed_token_ids: Annotated[Refusable, refused("say what is allowed as regex or ebnf")] = None
    cache_salt: Annotated[Refusable, refused("requests share one prefix cache")] = None
    kv_transfer_params: KvTransferParams | None = None
    mm_processor_kwargs: Annotated[Refusable, refused("this server reads text only")] = None
    no_stop_trim: Annotated[Refusable, refused("say include_stop_str_in_output", False)] = None
    return_hidden_states: Annotated[Refusable, refused("answers are text", False)] = None
    lora_path: Annotated[Refusable, refused("one model is served, without adapters")] = None
    session_params: Annotated[Refusable, refused(ELSEWHERE)] = None
    vllm_xargs: Annotated[Refusable, refused("vLLM's plugins are not served")] = None
    user: Annotated[str | None, no_effect(ELSEWHERE)] = None


class CachedTokens(Struct, frozen=True):
    """Prompt tokens by kind.

    Attributes:
        cached_tokens: tokens read from the prefix cache.
    """

    cached_tokens: int


class ReasoningTokens(Struct, frozen=True):
    """Output tokens by kind.

    Attributes:
        reasoning_tokens: tokens of the reasoning and its markers, whether or not it is returned.
    """

    reasoning_tokens: int


class Usage(Struct, frozen=True):
    """Token counts of a request. Prompt tokens count once, whatever `n` is.

    Attributes:
        completion_tokens_details: absent in answers of /v1/completions.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens | UnsetType = UNSET


class ChoiceExtras(Struct, frozen=True):
    """Extensions of a choice.

    Attributes:
        selection: selected pages, one entry per generated token, with one item per landmark layer.
    """

    selection: list[tuple[LayerSelection, ...]]

    @classmethod
    def joined(cls, parts: Iterable[ChoiceExtras]) -> ChoiceExtras:
        """Concatenate consecutive parts."""
        return cls([entry for part in parts for entry in part.selection])


class ScoredToken(Struct, frozen=True):
    """Log-probability of a token at a prompt position, in vLLM's format."""

    logprob: float
    rank: int
    decoded_token: str | None


PromptScore = dict[int, ScoredToken] | None
"""Token id -> log-probability at one prompt position; None for the first position."""


class ErrorDetail(Struct, frozen=True):
    """Error object in OpenAI's format."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(Struct, frozen=True):
    """Body of an error response."""

    error: ErrorDetail
