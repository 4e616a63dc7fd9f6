"""Sets the transfer of records up."""

from __future__ import annotations

from cairn.cache.paged import PageCache
from cairn.config import EngineConfig
from cairn.engine.transfer.agent import Agent
from cairn.engine.transfer.identity import Identity
from cairn.engine.transfer.joined import Records
from cairn.engine.transfer.nixl import NixlAgent
from cairn.engine.transfer.peer_memory import PeerMemory
from cairn.engine.transfer.receiver import Receiver
from cairn.engine.transfer.sender import Listener, Sender
from cairn.engine.transfer.tickets import Tickets
from cairn.engine.transfer.transfer import Transfers
from cairn.errors import BadConfig
from cairn.runner.device_records import DeviceRecords
from cairn.runner.host_records import HostRecords
from cairn.specs.disaggregation import NIXL, Disaggregation


def listen(config: EngineConfig) -> Listener | None:
    """Bind the port at which other engines request records; None: this engine does not serve
    records.

    Raises:
        BadConfig: it cannot be bound, several hosts hold the records, or they cannot be in GPU
            memory.
    """
    asked = config.disaggregation
    if config.staging and (config.device == "cpu" or config.tensor_parallel_size > 1):
        raise BadConfig(
            "disaggregation_transfer_backend is cuda, which takes one GPU, but device is "
            f"{config.device} and tensor_parallel_size {config.tensor_parallel_size}",
            "Use tcp",
        )
    if asked is not None and config.nodes is not None:
        raise BadConfig(
            f"nnodes is {config.nodes.count}, but records of several hosts do not travel",
            "Leave --nnodes or --disaggregation-mode out",
        )
    return Listener(asked) if asked is not None and asked.sends else None


def transfers(
    asked: Disaggregation,
    cache: PageCache,
    records: Records,
    listener: Listener | None,
    identity: Identity,
) -> Transfers:
    """Build the loop's side of transfers.

    Args:
        cache: the pages; the names of its host cache begin with the identity's key.
        listener: of `listen`; it answers from now on.
        identity: of this engine.

    Raises:
        BadConfig: the requested transport is not available.
    """
    assert cache.host is not None
    tickets = None
    agent: Agent | None = None
    if isinstance(records, DeviceRecords):
        agent = PeerMemory(records)
    elif asked.backend == NIXL:
        if not isinstance(records, HostRecords):
            raise BadConfig(
                "disaggregation_transfer_backend is nixl, but records are divided between ranks",
                "Use tcp, or --tensor-parallel-size 1",
            )
        agent = NixlAgent(records)
    if listener is not None:
        tickets = Tickets(cache.host)
        listener.serve(Sender(tickets, records, identity, asked.secret, agent))
    receiver = Receiver(records, identity, asked.secret, agent) if asked.receives else None
    address = asked.host, listener.port if listener is not None else 0
    return Transfers(cache, tickets, address, receiver, asked.recompute)
