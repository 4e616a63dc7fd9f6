"""Options of a model whose ranks are on several hosts (nodes); names are SGLang's and vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

from cairn.errors import BadConfig
from cairn.specs.disaggregation import LOOPBACK, SECRET_VARIABLE

DEFAULT_PORT = 29500
"""Of vLLM's --master-port."""
TORCHRUN = "TORCHELASTIC_RUN_ID"
"""An environment variable that processes of torchrun have."""


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """User options for ranks on several hosts.

    Attributes:
        nnodes: hosts that share the ranks evenly.
        node_rank: number of this one; 0 has the engine and the API.
        dist_init_addr: HOST:PORT of node 0, at which the others report.
        master_addr, master_port: the same as vLLM writes it.
        dist_timeout: seconds in which all ranks must have connected.
    """

    nnodes: int = field(
        default=1,
        metadata={
            "type": int,
            "help": "Number of hosts, which have equally many ranks.  [default: 1]",
        },
    )
    node_rank: int = field(
        default=0,
        metadata={
            "type": int,
            "help": "Index of this host; host 0 runs the engine and the API.  [default: 0]",
        },
    )
    dist_init_addr: str | None = field(
        default=None,
        metadata={
            "metavar": "HOST:PORT",
            "help": "Address of node 0, to which the others connect; beyond loopback "
            f"{SECRET_VARIABLE} must be set.",
        },
    )
    master_addr: str | None = field(
        default=None,
        metadata={"metavar": "HOST", "help": "The host of --dist-init-addr, as vLLM writes it."},
    )
    master_port: int | None = field(
        default=None,
        metadata={"type": int, "help": "The port of --dist-init-addr.  [default: 29500]"},
    )
    dist_timeout: float = field(
        default=60.0,
        metadata={
            "type": float,
            "help": "Seconds within which all ranks have to connect.  [default: 60]",
        },
    )


@dataclass(frozen=True, slots=True)
class Nodes:
    """The hosts of a model's ranks.

    Attributes:
        count: how many.
        number: of this one.
        host, port: where node 0 is; with torchrun the port of its store, which tells where.
        seconds: in which all ranks must have connected.
        secret: shared by all; empty: none.
        launched: each node is a process of torchrun, with one rank.
        local: number of the process on its host, and how many there are, where `launched`.
    """

    count: int
    number: int
    host: str
    port: int
    seconds: float
    secret: bytes
    launched: bool = False
    local: tuple[int, int] = (0, 1)


def node_options() -> tuple[Field[Any], ...]:
    """The fields of `NodeOptions`; their metadata says what a command line needs."""
    return fields(NodeOptions)


def resolve_nodes(options: NodeOptions, ranks: int, environment: Mapping[str, str]) -> Nodes | None:
    """What the options, or the environment of torchrun, mean; None: one host.

    Raises:
        BadConfig: values that are impossible or missing.
    """
    secret = environment.get(SECRET_VARIABLE, "").encode()
    if TORCHRUN in environment and int(environment["WORLD_SIZE"]) > 1:
        count = int(environment["WORLD_SIZE"])
        if ranks != count:
            raise BadConfig(
                f"torchrun started {count} processes, but tensor_parallel_size is {ranks}",
                f"Use --tensor-parallel-size {count}",
            )
        return _checked(
            Nodes(
                count,
                int(environment["RANK"]),
                environment["MASTER_ADDR"],
                int(environment["MASTER_PORT"]),
                options.dist_timeout,
                secret,
                True,
                (int(environment["LOCAL_RANK"]), int(environment["LOCAL_WORLD_SIZE"])),
            )
        )
    count, number = options.nnodes, options.node_rank
    for name, value, least in (("nnodes", count, 1), ("node_rank", number, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise BadConfig(f"{name} must be an integer of at least {least}, not {value!r}")
    if number >= count:
        raise BadConfig(f"node_rank is {number}, but nnodes is {count}", f"Use 0 to {count - 1}")
    if count == 1:
        return None
    if ranks % count:
        raise BadConfig(
            f"tensor_parallel_size is {ranks}, which {count} nodes cannot share evenly",
            f"Use a multiple of {count}",
        )
    address = options.dist_init_addr
    if address is None and options.master_addr is not None:
        address = f"{options.master_addr}:{options.master_port or DEFAULT_PORT}"
    host, _, port = (address or "").rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise BadConfig(
            f"nnodes is {count}, but dist_init_addr is {address!r}",
            "Give --dist-init-addr HOST:PORT, the same on all nodes",
        )
    return _checked(Nodes(count, number, host, int(port), options.dist_timeout, secret))


def _checked(nodes: Nodes) -> Nodes:
    if nodes.host not in LOOPBACK and not nodes.secret:
        raise BadConfig(
            f"nodes meet at {nodes.host!r}, which others can reach, but there is no secret",
            f"Set {SECRET_VARIABLE} to the same text on all nodes",
        )
    return nodes
