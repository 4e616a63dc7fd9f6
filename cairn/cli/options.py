"""Options that several commands share. What the user did not give is not passed on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, TypeVar

import click

from cairn.config import DTYPES, KV_CACHE_DTYPES, default_model_path
from cairn.errors import BadRequest
from cairn.specs.options import mixer_options
from cairn.specs.speculation import speculative_options
from cairn.types import Grammar, SamplingParams

F = TypeVar("F", bound=Callable[..., Any])

SAMPLING = (
    click.option("--n", type=int, help="Number of continuations.  [default: 1]"),
    click.option("--temperature", type=float, help="0 is greedy.  [default: 1.0]"),
    click.option("--top-p", type=float, help="Smallest set of this mass.  [default: 1.0]"),
    click.option("--top-k", type=int, help="The k most likely; 0 keeps all.  [default: 0]"),
    click.option("--min-p", type=float, help="Least share of the top's mass.  [default: 0]"),
    click.option("--sampling-seed", "seed", type=int, help="Seed of this request's draws."),
    click.option("--max-tokens", type=int, default=128, show_default=True, help="Longest output."),
    click.option("--min-tokens", type=int, help="No stop before this many.  [default: 0]"),
    click.option("--stop", multiple=True, metavar="TEXT", help="Ends the output; repeatable."),
    click.option("--stop-token-ids", metavar="IDS", help="Ids that end the output: 10,46."),
    click.option("--ignore-eos", is_flag=True, default=None, help="Do not end at end-of-text."),
    click.option("--logprobs", type=int, help="Alternatives per token (needs --json); -1: all."),
    click.option("--prompt-logprobs", type=int, help="The same for the prompt (needs --json)."),
    click.option("--presence-penalty", type=float, help="In [-2, 2].  [default: 0]"),
    click.option("--frequency-penalty", type=float, help="In [-2, 2].  [default: 0]"),
    click.option("--repetition-penalty", type=float, help="Above 0.  [default: 1]"),
    click.option(
        "--logit-bias", multiple=True, metavar="ID=VALUE", help="Added to a logit; repeatable."
    ),
    click.option(
        "--grammar",
        metavar="KIND=TEXT",
        help="What the output must look like: json_schema, regex or ebnf; @FILE reads the text.",
    ),
    click.option(
        "--selection",
        is_flag=True,
        default=None,
        help="The pages that each token read (needs --json and an HSA model).",
    ),
)


def _declared(entry: Field[Any]) -> Callable[[F], F]:
    """The flag of an option that says itself what it needs."""
    given = {
        key: entry.metadata[key] for key in ("type", "metavar", "help") if key in entry.metadata
    }
    if "choices" in entry.metadata:
        given["type"] = click.Choice(entry.metadata["choices"])
    return click.option("--" + entry.name.replace("_", "-"), **given)


ENGINE = (
    click.option("--dtype", type=click.Choice(DTYPES), help="Of weights and cache."),
    click.option(
        "--kv-cache-dtype",
        type=click.Choice(KV_CACHE_DTYPES),
        help="Of what pages hold: fp8_e4m3 (keys and values) or fp8_ds (latent attention) takes "
        "half the memory.",
    ),
    click.option("--device", metavar="NAME", help="auto, cpu, cuda or cuda:N."),
    click.option("--max-model-len", type=int, help="Longest sequence in tokens."),
    click.option("--kv-cache-memory", metavar="SIZE", help="Page pool: bytes, or such as 4GiB."),
    click.option(
        "--gpu-memory-utilization",
        type=float,
        metavar="SHARE",
        help="Of a GPU's memory, for weights, steps and pages together.  [default: 0.9]",
    ),
    click.option(
        "--disable-cuda-graph",
        is_flag=True,
        default=None,
        help="Launch all steps on a GPU operation by operation.",
    ),
    click.option(
        "--disable-overlap-schedule",
        is_flag=True,
        default=None,
        help="Plan a step on a GPU only when the one before has ended.",
    ),
    click.option("--page-size", type=int, help="Slots per page; the chunk size of an HSA model."),
    click.option("--max-num-seqs", type=int, help="Requests that run at once."),
    click.option("--chunked-prefill-size", type=int, help="Slots that one step may run."),
    click.option(
        "--itl-target-ms",
        type=float,
        help="Keep running streams at this pace while others prefill; instead of a fixed chunk.",
    ),
    click.option("--seed", "engine_seed", type=int, help="Of requests that bring none."),
    click.option("--no-prefix-caching", is_flag=True, help="Do not keep pages for reuse."),
    *map(_declared, (*mixer_options(), *speculative_options())),
    click.option(
        "--load-format",
        type=click.Choice(["auto", "random"]),
        help="random: draw the weights, for benchmarks.",
    ),
)

SAMPLING_NAMES = tuple(field.name for field in fields(SamplingParams))

ENGINE_NAMES = (
    "dtype",
    "kv_cache_dtype",
    "device",
    "max_model_len",
    "kv_cache_memory",
    "gpu_memory_utilization",
    "disable_cuda_graph",
    "disable_overlap_schedule",
    "page_size",
    "max_num_seqs",
    "chunked_prefill_size",
    "itl_target_ms",
    *(entry.name for entry in (*mixer_options(), *speculative_options())),
    "load_format",
)


def sampling_options(command: F) -> F:
    """Decorator: one option for every field of SamplingParams."""
    for option in reversed(SAMPLING):
        command = option(command)
    return command


def engine_options(command: F) -> F:
    """Decorator: the options of the engine."""
    for option in reversed(ENGINE):
        command = option(command)
    return command


def model_argument(command: F) -> F:
    """Decorator: the optional MODEL folder."""
    return click.argument("model", required=False, type=click.Path(path_type=Path))(command)


sampling_defaults_option = click.option(
    "--sampling-defaults",
    metavar="SOURCE",
    help="Of what is not said: model (its generation_config.json) or openai.  [default: model]",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")


def model_or_default(model: Path | None) -> Path:
    """The folder given, or that of the embedded model."""
    return default_model_path() if model is None else model


def engine_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of LLM from the parsed options: only those that the user gave."""
    chosen = {name: options[name] for name in ENGINE_NAMES if options[name] is not None}
    if options["engine_seed"] is not None:
        chosen["seed"] = options["engine_seed"]
    if options["no_prefix_caching"]:
        chosen["enable_prefix_caching"] = False
    return chosen


def sampling_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of SamplingParams from the parsed options: only those that the user gave.

    Raises:
        click.BadParameter: a list or a grammar that cannot be read.
    """
    chosen = {name: options[name] for name in SAMPLING_NAMES if options[name] not in (None, ())}
    if "stop_token_ids" in chosen:
        chosen["stop_token_ids"] = parse_ids(chosen["stop_token_ids"], "--stop-token-ids")
    if "logit_bias" in chosen:
        chosen["logit_bias"] = dict(_parse_bias(text) for text in chosen["logit_bias"])
    if "grammar" in chosen:
        chosen["grammar"] = _parse_grammar(chosen["grammar"])
    return chosen


def parse_ids(text: str, option: str) -> list[int]:
    """Token ids from "10,46".

    Raises:
        click.BadParameter: something in it is no integer.
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        message = f"{text!r} is not a list such as 10,46"
        raise click.BadParameter(message, param_hint=option) from None


def _parse_bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not ID=VALUE", param_hint="--logit-bias") from None


def _parse_grammar(text: str) -> Grammar:
    kind, _, grammar = text.partition("=")
    try:
        if grammar.startswith("@"):
            grammar = Path(grammar[1:]).read_text("utf-8")
        return Grammar(kind, grammar)
    except (BadRequest, OSError, UnicodeDecodeError) as error:
        raise click.BadParameter(str(error), param_hint="--grammar") from None
