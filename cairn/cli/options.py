"""Options that several commands share. Options that the user does not give are not passed on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, TypeVar

import click

from cairn.config import DTYPES, KV_CACHE_DTYPES, default_model_path
from cairn.errors import BadRequest
from cairn.specs.disaggregation import disaggregation_options
from cairn.specs.experts import expert_options
from cairn.specs.media import media_options
from cairn.specs.nodes import node_options
from cairn.specs.options import mixer_options
from cairn.specs.speculation import speculative_options
from cairn.types import Grammar, SamplingParams

F = TypeVar("F", bound=Callable[..., Any])


def stacked(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    """A decorator that adds several options, which help lists in this order."""

    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def count_option(name: str, default: int, text: str, least: int = 1) -> Callable[[F], F]:
    """An option for an integer of at least `least`; its help shows the default."""
    kind = click.IntRange(min=least)
    return click.option(name, type=kind, default=default, show_default=True, help=text)


SAMPLING = (
    click.option("--n", type=int, help="Outputs to generate for the prompt.  [default: 1]"),
    click.option(
        "--temperature",
        type=float,
        help="Sampling temperature; 0: greedy decoding.  [default: 1.0]",
    ),
    click.option(
        "--top-p",
        type=float,
        help="Sample from the most likely tokens whose probabilities sum to at least this.  "
        "[default: 1.0]",
    ),
    click.option(
        "--top-k",
        type=int,
        help=("Sample from the k most likely tokens; 0: from all.  [default: 0]"),
    ),
    click.option(
        "--min-p",
        type=float,
        help="Drop tokens whose probability is below this share of the most likely token's.  "
        "[default: 0]",
    ),
    click.option("--sampling-seed", "seed", type=int, help="Seed of this request's sampling."),
    click.option(
        "--max-tokens",
        type=int,
        default=128,
        show_default=True,
        help="Maximum output length in tokens.",
    ),
    click.option(
        "--min-tokens",
        type=int,
        help="Minimum output length in tokens.  [default: 0]",
    ),
    click.option(
        "--stop", multiple=True, metavar="TEXT", help="Text that ends the output; repeatable."
    ),
    click.option(
        "--stop-token-ids", metavar="IDS", help="Token ids that end the output, such as 10,46."
    ),
    click.option(
        "--ignore-eos", is_flag=True, default=None, help="Do not stop at the end-of-sequence token."
    ),
    click.option(
        "--no-skip-special-tokens",
        "skip_special_tokens",
        is_flag=True,
        flag_value=False,
        default=None,
        help="Show special tokens in the text.",
    ),
    click.option(
        "--include-stop-str-in-output",
        is_flag=True,
        default=None,
        help="Keep the stop string or stop id that ended the output in its text.",
    ),
    click.option(
        "--logprobs",
        type=int,
        help="Report the log-probabilities of this many tokens per position; -1: of the whole "
        "vocabulary. Needs --json.",
    ),
    click.option(
        "--prompt-logprobs", type=int, help="Like --logprobs, for the prompt. Needs --json."
    ),
    click.option(
        "--presence-penalty",
        type=float,
        help="Subtracted from the logits of tokens already generated, from -2 to 2.  [default: 0]",
    ),
    click.option(
        "--frequency-penalty",
        type=float,
        help="Subtracted from a token's logit for each time it was generated, from -2 "
        "to 2.  [default: 0]",
    ),
    click.option(
        "--repetition-penalty",
        type=float,
        help="Divides positive logits of tokens in prompt and output, multiplies "
        "negative ones; above 0.  [default: 1]",
    ),
    click.option(
        "--logit-bias",
        multiple=True,
        metavar="ID=VALUE",
        help="Add VALUE to the logit of token ID; repeatable.",
    ),
    click.option(
        "--grammar",
        metavar="KIND=TEXT",
        help="Constrain the output: json_schema=SCHEMA, regex=PATTERN or "
        "ebnf=GRAMMAR. A TEXT of @FILE is read from the file.",
    ),
    click.option(
        "--selection",
        is_flag=True,
        default=None,
        help="Report the pages that each generated token read. Needs --json and a landmark model.",
    ),
)


def _declared(entry: Field[Any]) -> Callable[[F], F]:
    """The flag of an option that is declared by a field of an options class."""
    given = {
        key: entry.metadata[key] for key in ("type", "metavar", "help") if key in entry.metadata
    }
    if "flag" in entry.metadata:
        given |= {"is_flag": True, "default": None}
    if "choices" in entry.metadata:
        given["type"] = click.Choice(entry.metadata["choices"])
    return click.option("--" + entry.name.replace("_", "-"), **given)


DECLARED = (
    *mixer_options(),
    *speculative_options(),
    *media_options(),
    *disaggregation_options(),
    *expert_options(),
    *node_options(),
)
"""Flags of the options classes whose fields declare their own flag and help."""

ENGINE = (
    click.option(
        "--dtype",
        type=click.Choice(DTYPES),
        help="Dtype of weights, activations and cache; auto: the checkpoint's, if the device "
        "computes in it natively.  [default: auto]",
    ),
    click.option(
        "--kv-cache-dtype",
        type=click.Choice(KV_CACHE_DTYPES),
        help="Dtype of the cache. fp8_e4m3 (keys and values) and fp8_ds (latent or compressed "
        "attention) take about half the memory of bfloat16, fp4_e2m1 (keys and values) a quarter "
        "to a third.  [default: auto, as --dtype]",
    ),
    click.option(
        "--device",
        metavar="NAME",
        help="cpu, cuda, cuda:N, or auto: a GPU if there is one.  [default: auto]",
    ),
    click.option(
        "--max-model-len",
        "--context-length",
        type=int,
        help="Maximum length of prompt and output together, in tokens.  [default: the "
        "model's, or what the page pool holds]",
    ),
    click.option(
        "--allow-long-max-model-len",
        is_flag=True,
        default=None,
        help="Allow a --max-model-len beyond the length that the model was trained for.",
    ),
    click.option(
        "--kv-cache-memory",
        metavar="SIZE",
        help="Size of the page pool in bytes, or such as 4GiB.  [default: 40% of the "
        "free memory on a CPU; on a GPU see --gpu-memory-utilization]",
    ),
    click.option(
        "--kv-host-memory",
        metavar="SIZE",
        help="Size of a second prefix cache in host memory, such as 64GiB, for pages that the "
        "device's prefix cache evicts.  [default: none]",
    ),
    click.option(
        "--kv-host-tier",
        is_flag=True,
        default=None,
        help="Keep all pages of landmark layers in --kv-host-memory. The device keeps their "
        "summaries, the window pages, and frames, a cache of selected pages.",
    ),
    click.option(
        "--gpu-memory-utilization",
        "--mem-fraction-static",
        type=float,
        metavar="SHARE",
        help="Share of a GPU's memory for weights, activations and pages together.  [default: 0.9]",
    ),
    click.option(
        "--disable-cuda-graph",
        "--enforce-eager",
        is_flag=True,
        default=None,
        help="Do not use CUDA graphs.",
    ),
    click.option(
        "--disable-overlap-schedule",
        is_flag=True,
        default=None,
        help="Plan each step after the previous one has ended, instead of while it runs on the "
        "GPU.",
    ),
    click.option(
        "--page-size",
        "--block-size",
        type=int,
        help="Slots per page. A landmark model takes its chunk size only.  [default: "
        "the chunk size, else 64]",
    ),
    click.option(
        "--max-num-seqs",
        "--max-running-requests",
        type=int,
        help="Maximum number of running sequences.  [default: 64]",
    ),
    click.option(
        "--chunked-prefill-size",
        "--max-num-batched-tokens",
        type=int,
        help="Maximum number of slots per step.  [default: by device and dtype]",
    ),
    click.option(
        "--itl-target-ms",
        type=float,
        help="Target of the milliseconds between two tokens of a running stream while other "
        "prompts are prefilled. Chunks are then sized by measured times, instead of "
        "--chunked-prefill-size.",
    ),
    click.option(
        "--seed",
        "--random-seed",
        "engine_seed",
        type=int,
        help="Base seed of the sampling of requests without a seed.  [default: 0]",
    ),
    click.option(
        "--no-prefix-caching",
        "--no-enable-prefix-caching",
        "--disable-radix-cache",
        is_flag=True,
        help="Do not reuse the pages of finished requests for later ones with the same prefix.",
    ),
    *map(_declared, DECLARED),
    click.option(
        "--tensor-parallel-size",
        "--tp-size",
        "-tp",
        type=int,
        help="Number of ranks that share the model: GPUs, or processes on a CPU.  [default: 1]",
    ),
    click.option(
        "--load-format",
        type=click.Choice(["auto", "random"]),
        help="random: use random weights instead of the folder's, for benchmarks.  [default: auto]",
    ),
    click.option(
        "--quantization",
        type=click.Choice(["auto", "fp8", "fp4"]),
        help="fp8: quantise the matrices of an unquantised checkpoint to fp8 on load. "
        "fp4: dequantise experts in fp4 (DeepSeek-V4) when they run instead of on load, which "
        "takes a quarter of the memory.  [default: auto]",
    ),
)

REPLICAS = (
    click.option(
        "--data-parallel-size",
        "--dp-size",
        "-dp",
        type=int,
        help="Number of engines (replicas) of the model, each with GPUs of its own, or on a CPU "
        "with a share of the cores.  [default: 1]",
    ),
    click.option(
        "--load-balance-method",
        metavar="NAME",
        help="How prompts are distributed to replicas: auto (by cached prefixes and load), "
        "round_robin or shortest_queue.  [default: auto]",
    ),
)

SAMPLING_NAMES = tuple(field.name for field in fields(SamplingParams))

ENGINE_NAMES = (
    "dtype",
    "kv_cache_dtype",
    "device",
    "max_model_len",
    "allow_long_max_model_len",
    "kv_cache_memory",
    "kv_host_memory",
    "kv_host_tier",
    "gpu_memory_utilization",
    "disable_cuda_graph",
    "disable_overlap_schedule",
    "page_size",
    "max_num_seqs",
    "chunked_prefill_size",
    "itl_target_ms",
    "tensor_parallel_size",
    *(entry.name for entry in DECLARED),
    "load_format",
    "quantization",
)


sampling_options = stacked(*SAMPLING)
engine_options = stacked(*ENGINE)


def model_argument(command: F) -> F:
    """Decorator: the optional MODEL folder."""
    return click.argument("model", required=False, type=click.Path(path_type=Path))(command)


GENERATION_CONFIG = {"auto": "model", "vllm": "openai"}
"""Values of vLLM's --generation-config -> those of --sampling-defaults."""

sampling_defaults_option = click.option(
    "--sampling-defaults",
    "--generation-config",
    metavar="SOURCE",
    callback=lambda context, option, value: GENERATION_CONFIG.get(value, value),
    help="Sampling parameters that are not given: those of the model's "
    "generation_config.json (model), or temperature 1 and no filters "
    "(openai).  [default: model]",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
records_option = click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File that records are appended to.  [default: "
    "benchmarks/results/<date>-<machine>-<name>.json]",
)
chart_option = click.option(
    "--chart",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.png",
    help="Draw a chart too. Needs `pip install 'cairn-llm[bench]'`.",
)


def model_or_default(model: Path | None) -> Path:
    """`model`, or by default the folder of the embedded model."""
    return default_model_path() if model is None else model


def engine_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Convert parsed options to keywords of LLM. Only those that the user gave."""
    chosen = {name: options[name] for name in ENGINE_NAMES if options[name] is not None}
    if options["engine_seed"] is not None:
        chosen["seed"] = options["engine_seed"]
    if options["no_prefix_caching"]:
        chosen["enable_prefix_caching"] = False
    return chosen


def sampling_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Convert parsed options to keywords of SamplingParams. Only those that the user gave.

    Raises:
        click.BadParameter: a list or a grammar that cannot be parsed.
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
    """Parse token ids such as "10,46".

    Raises:
        click.BadParameter: an item is not an integer.
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
