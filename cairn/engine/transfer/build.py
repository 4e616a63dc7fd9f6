"""Sets the transfer of records up."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

from cairn.cache.paged import PageCache
from cairn.cache.record import fingerprint
from cairn.cache.schema import CacheSchema
from cairn.config import EngineConfig
from cairn.engine.transfer.agent import Agent
from cairn.engine.transfer.joined import Records
from cairn.engine.transfer.nixl import NixlAgent
from cairn.engine.transfer.peer_memory import PeerMemory
from cairn.engine.transfer.receiver import Receiver
from cairn.engine.transfer.sender import Listener, Sender
from cairn.engine.transfer.tickets import Tickets
from cairn.engine.transfer.transfer import Transfers
from cairn.errors import BadConfig
from cairn.models.checkpoint import has_weights, is_gguf, read_headers
from cairn.runner.device_records import DeviceRecords
from cairn.runner.host_records import HostRecords
from cairn.specs.disaggregation import NIXL, Disaggregation
from cairn.specs.experts import without_places

COMPARED = 4096
"""Bytes hashed at the beginning of each stored tensor to tell checkpoints apart."""


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
    asked: Disaggregation, cache: PageCache, records: Records, listener: Listener | None
) -> Transfers:
    """Build the loop's side of transfers.

    Args:
        cache: the pages; the names of its host cache begin with `model_key`.
        listener: of `listen`; it answers from now on.

    Raises:
        BadConfig: the requested transport is not available.
    """
    assert cache.host is not None
    tickets, model = None, cache.host.root
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
        listener.serve(Sender(tickets, records, model, asked.secret, agent))
    receiver = Receiver(records, model, asked.secret, agent) if asked.receives else None
    address = asked.host, listener.port if listener is not None else 0
    return Transfers(cache, tickets, address, receiver, asked.recompute)


def model_key(folder: Path, config: EngineConfig, schema: CacheSchema) -> bytes:
    """16 bytes; equal for engines whose records may be exchanged: same model with the same options,
    same layout of records, and as far as the beginning of each tensor tells the same weights.
    Ranks, and which of them has which experts, are each engine's own business.

    Args:
        schema: of the whole model.
    """
    found = blake2b(fingerprint(schema), digest_size=16)
    found.update(
        f"{without_places(config.model)!r} {config.dtype} {config.kv_cache_dtype}".encode()
    )
    if config.load_format == "random":
        found.update(f"random {config.seed}".encode())
    elif has_weights(folder) or is_gguf(folder):
        for name, entry in sorted(read_headers(folder).items()):
            found.update(f"{name} {entry.dtype} {entry.shape}".encode())
            with entry.file.open("rb") as file:
                file.seek(entry.begin)
                found.update(file.read(min(COMPARED, entry.end - entry.begin)))
    return found.digest()
