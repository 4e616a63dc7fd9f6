"""`cairn generate`: generates text from a prompt."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cairn.cli.options import (
    engine_arguments,
    engine_options,
    json_option,
    model_argument,
    model_or_default,
    parse_ids,
    sampling_arguments,
    sampling_defaults_option,
    sampling_options,
)
from cairn.errors import CairnError
from cairn.types import FinishReason, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from cairn.llm import LLM

Prompt = str | dict[str, list[int]]


@click.command()
@model_argument
@click.option("--prompt", help="Prompt text.")
@click.option(
    "--prompt-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with the prompt text.",
)
@click.option("--prompt-token-ids", metavar="IDS", help="Prompt as token ids, such as 72,105.")
@click.option(
    "--chat",
    is_flag=True,
    help=("Apply the chat template to the prompt, as a message of the user."),
)
@json_option
@sampling_options
@sampling_defaults_option
@engine_options
def generate(
    model: Path | None,
    prompt: str | None,
    prompt_file: Path | None,
    prompt_token_ids: str | None,
    chat: bool,
    as_json: bool,
    sampling_defaults: str | None,
    **options: Any,
) -> None:
    """Generate text with MODEL and stream it to stdout.

    The prompt comes from --prompt, --prompt-file, --prompt-token-ids or stdin.
    """
    given = _read_prompt(prompt, prompt_file, prompt_token_ids)
    sampling = sampling_arguments(options)
    if not as_json and {"logprobs", "prompt_logprobs", "selection"} & sampling.keys():
        raise click.UsageError("log-probabilities and selections are shown with --json only")
    if chat and not isinstance(given, str):
        raise click.UsageError("--chat takes text, not --prompt-token-ids")

    if sampling_defaults not in (None, "model", "openai"):
        raise click.UsageError(f"--sampling-defaults is {sampling_defaults!r}, not model or openai")

    params = SamplingParams(**sampling)

    from cairn.llm import LLM

    llm = LLM(str(model_or_default(model)), **engine_arguments(options))
    try:
        if sampling_defaults != "openai":
            params = dataclasses.replace(llm.default_params, **sampling)
        if chat or as_json or params.n > 1:
            result = _run(llm, given, params, chat)
            _print_whole(result, as_json, llm.has_tokenizer)
        else:
            result = _print_stream(llm, given, params)
    finally:
        llm.shutdown()
    if any(output.finish_reason == FinishReason.ERROR for output in result.outputs):
        raise CairnError("the engine failed on this prompt", "The log above says where")


def _read_prompt(text: str | None, file: Path | None, ids: str | None) -> Prompt:
    if sum(source is not None for source in (text, file, ids)) > 1:
        raise click.UsageError("give one of --prompt, --prompt-file and --prompt-token-ids")
    if ids is not None:
        return {"prompt_token_ids": parse_ids(ids, "--prompt-token-ids")}
    if text is not None:
        return text
    if file is not None:
        return _decode(file.read_bytes(), str(file))
    if sys.stdin.isatty():
        raise click.UsageError("no prompt: use --prompt, --prompt-file or stdin")
    return _decode(sys.stdin.buffer.read(), "stdin")


def _decode(data: bytes, source: str) -> str:
    """Decode a prompt from UTF-8 without changing its line ends."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{source} is not UTF-8: {error.reason} at {error.start}") from None


def _run(llm: LLM, prompt: Prompt, params: SamplingParams, chat: bool) -> RequestOutput:
    if chat:
        return llm.chat([{"role": "user", "content": str(prompt)}], params)[0]
    return llm.generate([prompt], params)[0]


def _print_stream(llm: LLM, prompt: Prompt, params: SamplingParams) -> RequestOutput:
    for piece, result in llm.stream(prompt, params):
        click.echo(piece, nl=False)
        if result.finished and not llm.has_tokenizer:
            click.echo(",".join(map(str, result.outputs[0].token_ids)), nl=False)
    click.echo()
    return result


def _print_whole(result: RequestOutput, as_json: bool, has_text: bool) -> None:
    if as_json:
        click.echo(json.dumps(_plain(result), ensure_ascii=False))
        return
    for output in result.outputs:
        if len(result.outputs) > 1:
            click.echo(f"[{output.index}]", err=True)
        click.echo(output.text if has_text else ",".join(map(str, output.token_ids)))


def _plain(value: Any) -> Any:
    """Convert dataclasses and mappings at any depth to dicts, for JSON."""
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
