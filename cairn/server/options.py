"""Options of the server; those of the engine are in `cairn.config`."""

from __future__ import annotations

import ipaddress
import math
import re
from dataclasses import dataclass
from typing import Any, Literal

from cairn.engine.routing import BALANCES, Balance
from cairn.errors import BadConfig
from cairn.names import checked_keywords
from cairn.server.reasoning_markers import NAMES as REASONING_PARSERS
from cairn.server.tool_calls.formats import NAMES as TOOL_PARSERS

MIB = 1 << 20
LOG_FORMATS = ("text", "json")
SAMPLING_DEFAULTS = ("model", "openai")
SMALLEST_BODY = 1024


@checked_keywords
@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Options of `cairn serve`. Raises BadConfig for an invalid value.

    Attributes:
        host: address to listen on.
        port: port of the API; 0 chooses a free one.
        admin_port: port of the admin routes, on the loopback address. 0 disables them; None is
            `port` + 1, or a free port if `port` is 0.
        allowed_hosts: accepted values of the Host header beside loopback and `host`; "*" accepts
            all. Empty: a server on a loopback address without keys accepts loopback and `host`,
            any other server accepts all.
        api_keys: keys, one of which every route but /health and /ready requires; empty: none.
        allowed_origins: origins that CORS allows, such as https://example.com; "*" allows all.
        served_model_name: one or several names of the model in the API; responses contain the
            first. Empty: the folder's name.
        data_parallel_size: number of engines (replicas), each with GPUs of its own, or on a CPU
            with a share of the cores and the memory.
        load_balance_method: how prompts are distributed to replicas: "auto" (by cached prefixes and
            load), "round_robin" or "shortest_queue".
        max_waiting: maximum number of outputs in the queue.
        max_body_bytes: maximum size of a request body.
        max_json_depth: maximum nesting of a request body.
        max_headers: maximum number of header lines of a request.
        max_prompts: maximum number of prompts of a completions request.
        max_stop: maximum number of stop strings of a request.
        max_n: maximum `n` of a request.
        max_logprobs: maximum number of alternatives per token.
        max_selection_tokens: maximum output length with a report of selected pages.
        body_timeout: seconds within which a request body has to arrive.
        shutdown_timeout: seconds that running requests have to finish after SIGTERM.
        ready_step_age: seconds that an engine step may take before /ready returns 503.
        step_limit: seconds that an engine step may take before the server exits.
        sampling_defaults: defaults of sampling parameters: "model" (generation_config.json) or
            "openai" (temperature 1, no filters).
        tool_parser: name of the format of tool calls, or "auto" to detect it in the chat template.
        reasoning_parser: name of the reasoning markers, "auto" to detect them in the chat template,
            or "none" to leave reasoning in the content.
        root_path: path prefix under which a proxy serves this server, such as "/llm".
        log_format: "text" or "json".
        trace: target of trace spans: "otel" (the OpenTelemetry provider of the process) or the name
            of a file; None disables them.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    admin_port: int | None = None
    allowed_hosts: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    served_model_name: str | tuple[str, ...] = ()
    data_parallel_size: int = 1
    load_balance_method: Balance = "auto"
    max_waiting: int = 1024
    max_body_bytes: int = 16 * MIB
    max_json_depth: int = 64
    max_headers: int = 128
    max_prompts: int = 256
    max_stop: int = 16
    max_n: int = 64
    max_logprobs: int = 20
    max_selection_tokens: int = 4096
    body_timeout: float = 60.0
    shutdown_timeout: float = 30.0
    ready_step_age: float = 5.0
    step_limit: float = 300.0
    sampling_defaults: Literal["model", "openai"] = "model"
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    root_path: str = ""
    log_format: Literal["text", "json"] = "text"
    trace: str | None = None

    def __post_init__(self) -> None:
        _port("port", self.port)
        if self.admin_port is not None:
            _port("admin_port", self.admin_port)
        if self.admin_port and self.admin_port == self.port:
            raise BadConfig(
                f"admin_port is {self.admin_port}, the port of the API",
                "Choose another --admin-port, or 0 for no admin routes",
            )
        if self.port == 65535 and self.admin_port is None:
            raise BadConfig("port is 65535, the last one", "Give --admin-port, or 0 for none")
        if not isinstance(self.host, str) or not self.host:
            raise BadConfig(f"host is {self.host!r}", "Give an address such as 127.0.0.1")
        self._check_texts()
        _integer("max_body_bytes", self.max_body_bytes, SMALLEST_BODY)
        _integer("max_waiting", self.max_waiting, 0)
        _integer("max_logprobs", self.max_logprobs, 0)
        for name in (
            *("data_parallel_size", "max_json_depth", "max_headers", "max_prompts"),
            *("max_stop", "max_n"),
        ):
            _integer(name, getattr(self, name), 1)
        _integer("max_selection_tokens", self.max_selection_tokens, 0)
        _seconds("shutdown_timeout", self.shutdown_timeout, zero=True)
        for name in ("body_timeout", "ready_step_age", "step_limit"):
            _seconds(name, getattr(self, name))

    @property
    def served_model_names(self) -> tuple[str, ...]:
        """The names of the model in the API."""
        names = self.served_model_name
        return (names,) if isinstance(names, str) else names

    def _check_texts(self) -> None:
        for key in self.api_keys:
            # A header can carry printable ASCII only.
            if not isinstance(key, str) or not re.fullmatch(r"[!-~]+", key):
                raise BadConfig("an API key is empty or has a character that no header can carry")
        for host in self.allowed_hosts:
            if not isinstance(host, str) or not (host == "*" or _is_host(host)):
                raise BadConfig(
                    f"allowed_hosts has {host!r}",
                    'Give a name or an address without scheme and port, or "*" for all',
                )
        for origin in self.allowed_origins:
            _origin(origin)
        for name in self.served_model_names:
            if not isinstance(name, str) or not name.strip():
                raise BadConfig(f"served_model_name is {name!r}", "Give a name")
        _one_of("load_balance_method", self.load_balance_method, BALANCES)
        _one_of("sampling_defaults", self.sampling_defaults, SAMPLING_DEFAULTS)
        _one_of("tool_parser", self.tool_parser, ("auto", *TOOL_PARSERS))
        _one_of("reasoning_parser", self.reasoning_parser, ("auto", "none", *REASONING_PARSERS))
        _one_of("log_format", self.log_format, LOG_FORMATS)
        if self.root_path and not re.fullmatch(r"(/[!-.0-~]+)+", str(self.root_path)):
            raise BadConfig(f"root_path is {self.root_path!r}", "Give a path such as /llm")
        if self.trace is not None and not self.trace:
            raise BadConfig("trace is empty", 'Give "otel" or the name of a file')


def _is_host(text: str) -> bool:
    """Whether `text` is a host name or an IP address; an IPv6 address may have brackets."""
    try:
        ipaddress.ip_address(text.removeprefix("[").removesuffix("]"))
    except ValueError:
        return re.fullmatch(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", text) is not None
    return True


def _origin(origin: object) -> None:
    """Raise BadConfig unless `origin` has the form of an Origin header: scheme, host and port."""
    text = str(origin)
    pattern = r"\*|null|[a-z][a-z0-9+.-]*://[^/?#\s*A-Z@,]+"
    if not isinstance(origin, str) or not re.fullmatch(pattern, text):
        raise BadConfig(
            f"allowed_origins has {origin!r}",
            "Write scheme, host and port in lower case without a path, such as "
            "https://example.com; * for all",
        )


def _port(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 65535:
        raise BadConfig(f"{name} is {value!r}", "Ports go from 1 to 65535")


def _integer(name: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise BadConfig(f"{name} must be an integer >= {low}, not {value!r}")


def _seconds(name: str, value: Any, zero: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise BadConfig(f"{name} must be a number of seconds {'>=' if zero else '>'} 0: {value!r}")


def _one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise BadConfig(f"{name} is {value!r}", f"Choose one of {', '.join(known)}")
