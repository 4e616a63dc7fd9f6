"""Options of prefill and decode in different processes; names are SGLang's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

from cairn.errors import BadConfig

SECRET_VARIABLE = "CAIRN_CLUSTER_SECRET"
"""Environment variable with the secret that both processes share."""
PREFILL, DECODE, BOTH = "prefill", "decode", "both"
MODES = ("null", PREFILL, DECODE, BOTH)
TCP, NIXL, CUDA = "tcp", "nixl", "cuda"
BACKENDS = (TCP, NIXL, CUDA)
STAGING = 2 << 30
"""Default bytes of GPU memory for records in transfer."""
ON_FAILURE = ("recompute", "fail")
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True)
class DisaggregationOptions:
    """User options of disaggregation.

    Attributes:
        disaggregation_mode: "prefill" keeps the pages of prompts for other engines to fetch,
            "decode" takes those of other processes, "both" does both; None or "null": neither.
        disaggregation_transfer_backend: "tcp"; "nixl" reads pages by NIXL from engines that have
            it too; "cuda" keeps them in GPU memory, from which other GPUs of the host read them.
        disaggregation_staging_size: bytes of GPU memory for pages in transfer with "cuda", or text
            such as "2GiB".
        disaggregation_bootstrap_host: address at which others fetch pages, sent to them.
        disaggregation_bootstrap_port: its port, of further replicas the next ones; 0: any that is
            free.
        disaggregation_load_failure: what happens to a request whose pages were not received:
            "recompute" runs its prompt, "fail" ends it with status 503.
    """

    disaggregation_mode: str | None = field(
        default=None,
        metadata={
            "choices": MODES,
            "help": (
                "prefill: keep the pages of prompts for other servers; decode: fetch pages from "
                "other servers, as kv_transfer_params of a request says; both.  [default: null]"
            ),
        },
    )
    disaggregation_transfer_backend: str = field(
        default="tcp",
        metadata={
            "choices": BACKENDS,
            "help": "Transport of pages; cuda: between GPUs of one host.  [default: tcp]",
        },
    )
    disaggregation_staging_size: int | str | None = field(
        default=None,
        metadata={
            "metavar": "SIZE",
            "help": (
                "GPU memory for pages in transfer, with the transfer backend cuda.  [default: 2GiB]"
            ),
        },
    )
    disaggregation_bootstrap_host: str = field(
        default="127.0.0.1",
        metadata={
            "metavar": "ADDRESS",
            "help": (
                "Address at which other servers request pages; beyond loopback "
                f"{SECRET_VARIABLE} must be set.  [default: 127.0.0.1]"
            ),
        },
    )
    disaggregation_bootstrap_port: int = field(
        default=8998,
        metadata={
            "type": int,
            "help": "The port of --disaggregation-bootstrap-host, the next ones for further "
            "replicas; 0: any free port.  [default: 8998]",
        },
    )
    disaggregation_load_failure: str = field(
        default="recompute",
        metadata={
            "choices": ON_FAILURE,
            "help": (
                "If the pages of a request cannot be fetched: compute its prompt, or fail with "
                "503.  [default: recompute]"
            ),
        },
    )


@dataclass(frozen=True, slots=True)
class Disaggregation:
    """Role of an engine in disaggregation.

    Attributes:
        sends: it keeps pages for others.
        receives: it takes pages of others.
        host, port: where others fetch pages.
        recompute: a prompt whose pages were not received is run here.
        secret: shared by all; empty: none.
        backend: how records travel, one of BACKENDS.
        staging: bytes of GPU memory for records; 0: they are in host memory.
    """

    sends: bool
    receives: bool
    host: str
    port: int
    recompute: bool
    secret: bytes
    backend: str = TCP
    staging: int = 0


def disaggregation_options() -> tuple[Field[Any], ...]:
    """The fields of `DisaggregationOptions`; their metadata says what a command line needs."""
    return fields(DisaggregationOptions)


def resolve_disaggregation(
    options: DisaggregationOptions,
    host_memory: int,
    staging: int | None,
    environment: Mapping[str, str],
) -> Disaggregation | None:
    """What the options mean; None: the engine works alone.

    Args:
        host_memory: bytes of the host prefix cache, through which pages travel.
        staging: bytes that disaggregation_staging_size asks for; None: it is not given.
        environment: variables, for the secret.

    Raises:
        BadConfig: an unknown value, no memory for pages or memory of the wrong kind, an address
            that others can reach without a secret, or a value without a mode that uses it.
    """
    for name, known in (
        ("disaggregation_mode", (None, *MODES)),
        ("disaggregation_transfer_backend", BACKENDS),
        ("disaggregation_load_failure", ON_FAILURE),
    ):
        value = getattr(options, name)
        if value not in known:
            raise BadConfig(
                f"{name} is {value!r}", f"Choose one of {', '.join(filter(None, known))}"
            )
    mode, port = options.disaggregation_mode, options.disaggregation_bootstrap_port
    if mode in (None, "null"):
        _refuse_unused(options)
        return None
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port < 65536:
        raise BadConfig(f"disaggregation_bootstrap_port is {port!r}", "Give a port, or 0")
    backend = options.disaggregation_transfer_backend
    _check_memory(mode, backend, host_memory, staging)
    secret = environment.get(SECRET_VARIABLE, "").encode()
    sends = mode in (PREFILL, BOTH)
    host = options.disaggregation_bootstrap_host
    if sends and not secret and host not in LOOPBACK:
        raise BadConfig(
            f"disaggregation_bootstrap_host is {host!r}, which others can reach, but there is no "
            "secret",
            f"Set {SECRET_VARIABLE} to the same text for all engines",
        )
    recompute = options.disaggregation_load_failure == "recompute"
    staging = (staging or STAGING) if backend == CUDA else 0
    receives = mode in (DECODE, BOTH)
    return Disaggregation(sends, receives, host, port, recompute, secret, backend, staging)


def _refuse_unused(options: DisaggregationOptions) -> None:
    """Raise BadConfig for a value that needs a mode."""
    for each in disaggregation_options():
        value = getattr(options, each.name)
        if each.name != "disaggregation_mode" and value != each.default:
            raise BadConfig(
                f"{each.name} is {value!r}, but disaggregation_mode is null",
                f"Give disaggregation_mode, or leave out {each.name}",
            )


def _check_memory(mode: str, backend: str, host_memory: int, staging: int | None) -> None:
    """Raise BadConfig unless there is memory for pages where the backend wants it."""
    if backend == CUDA and host_memory:
        raise BadConfig(
            "disaggregation_transfer_backend is cuda, which keeps pages in GPU memory, but "
            f"kv_host_memory is {host_memory}",
            "Give disaggregation_staging_size (--disaggregation-staging-size) in its place",
        )
    if backend != CUDA and staging is not None:
        raise BadConfig(
            f"disaggregation_staging_size is {staging}, but with the transfer backend {backend} "
            "pages are in host memory",
            "Give kv_host_memory (--kv-host-memory) in its place",
        )
    if backend != CUDA and not host_memory:
        raise BadConfig(
            f"disaggregation_mode is {mode}, but pages travel through host memory, of which "
            "kv_host_memory gives none",
            "Give --kv-host-memory too, such as 4GiB",
        )
