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
from cairn.server.tool_calls.forms import NAMES as TOOL_PARSERS

MIB = 1 << 20
LOG_FORMATS = ("text", "json")
SAMPLING_DEFAULTS = ("model", "openai")
SMALLEST_BODY = 1024


@checked_keywords
@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Options of `cairn serve`. Raises BadConfig for a value that is impossible.

    Attributes:
        host: address to listen on.
        port: of the API; 0 takes a free one.
        admin_port: of the admin routes, always on the loopback address; 0 leaves them out, None
            takes the port after the API's (a free one where that is free-chosen).
        allowed_hosts: further names and addresses that a Host header may have; with them every
            other one is refused, and "*" takes all. Empty: only a server on a loopback address
            without keys refuses what is not loopback or `host`.
        api_keys: every call but /health and /ready needs one of them; empty: open to all.
        allowed_origins: whose pages a browser lets ask this server, as https://example.com; "*":
            those of every site; empty: its own page alone.
        served_model_name: what clients call the model, one name or several, of which answers say
            the first; empty: the folder's name.
        data_parallel_size: engines of the model, each with a GPU or a share of the host of its
            own.
        load_balance_method: how prompts are shared out among them: "auto" (by the prefixes that
            they have seen, and by load), "round_robin" or "shortest_queue".
        max_waiting: continuations that may wait for the engine beside those that run.
        max_body_bytes: longest request body.
        max_json_depth: deepest nesting of a request body.
        max_headers: most header lines of a request.
        max_prompts: prompts of one completions request.
        max_stop: stop strings of one request.
        max_n: continuations of one prompt.
        max_logprobs: alternatives per token.
        max_selection_tokens: longest output whose page selection is reported.
        body_timeout: seconds within which a request body must have arrived.
        shutdown_timeout: seconds that running requests get to finish after SIGTERM.
        ready_step_age: seconds that one engine step may take before /ready says no.
        step_limit: seconds after which a step counts as stuck and the server ends.
        sampling_defaults: of requests that do not say: "model", what generation_config.json
            recommends, or "openai", temperature 1 and all tokens.
        tool_parser: "auto" (by the chat template), or the name of a form of tool calls.
        reasoning_parser: "auto" (by the chat template), "none" (what the model thinks is part of
            the content), or the name of a form of thoughts.
        root_path: what a proxy has before the paths of the routes, such as "/llm"; empty: nothing.
        log_format: "text" or "json".
        trace: where spans go: "otel" (the OpenTelemetry provider of the process) or the name of
            a file; None: none are made.
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
            # Other characters cannot be sent in a header.
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
    """A host name, or an IP address (one of version 6 may stand in brackets)."""
    try:
        ipaddress.ip_address(text.removeprefix("[").removesuffix("]"))
    except ValueError:
        return re.fullmatch(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", text) is not None
    return True


def _origin(origin: object) -> None:
    """As a browser writes it in a request: scheme, host and port, in small letters."""
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
