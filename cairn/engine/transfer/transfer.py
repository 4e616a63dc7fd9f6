"""The engine loop's side of a transfer: issues tickets for records, and fetches records by them."""

from __future__ import annotations

import logging
import uuid
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field

from cairn.cache.host import PAGE, STATE, WINDOW, page_names
from cairn.cache.paged import PageCache
from cairn.cache.radix import page_keys
from cairn.engine.request import Request
from cairn.engine.transfer.receiver import Fetched, Peer, Receiver, Wanted
from cairn.engine.transfer.tickets import Tickets
from cairn.errors import BadRequest, PeerFailed
from cairn.specs.disaggregation import SECRET_VARIABLE
from cairn.types import KvTransferParams

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Fetch:
    """A fetch in progress, and the requests that wait for it."""

    peer: Peer
    wanted: list[Wanted]
    future: Future[Fetched]
    waiters: list[Future[Fetched]] = field(default_factory=list)


class Transfers:
    """Transfers of records between the host memories of two engines, never between their devices,
    so that an aborted transfer cannot damage a page in use.

    Args:
        cache: the pages; it has a host cache.
        tickets: tickets that this engine issues; None: it issues none.
        address: where they are claimed.
        receiver: fetches records; None: this engine takes none.
        recompute: see `Disaggregation`.

    Attributes:
        failures: requests whose records did not all come, by reason.
    """

    def __init__(
        self,
        cache: PageCache,
        tickets: Tickets | None,
        address: tuple[str, int],
        receiver: Receiver | None,
        recompute: bool,
    ) -> None:
        assert cache.host is not None
        self._cache, self._host = cache, cache.host
        self._tickets, self._address, self._receiver = tickets, address, receiver
        self._recompute = recompute
        self._engine_id = uuid.uuid4().hex
        self._fetches: list[_Fetch] = []
        self.failures: Counter[str] = Counter()

    @property
    def running(self) -> list[Future[Fetched]]:
        """Number of fetches in progress."""
        return [fetch.future for fetch in self._fetches]

    def check(self, asked: KvTransferParams) -> None:
        """Raise BadRequest for transfers that this engine does not support, or not with these
        parameters."""
        if asked.do_remote_decode and self._tickets is None:
            raise BadRequest(
                "kv_transfer_params ask for do_remote_decode, but this engine keeps no pages for "
                "others",
                "Send it to one with --disaggregation-mode prefill or both",
            )
        if asked.do_remote_prefill:
            if self._receiver is None:
                raise BadRequest(
                    "kv_transfer_params ask for do_remote_prefill, but this engine takes no pages "
                    "of others",
                    "Send it to one with --disaggregation-mode decode or both",
                )
            peer = _peer_of(asked)
            if not self._receiver.trusts(peer.host):
                raise BadRequest(
                    f"kv_transfer_params name the host {peer.host!r}, but without a secret this "
                    "engine takes pages of its own machine alone",
                    f"Set {SECRET_VARIABLE} to the same text for all engines",
                )

    def keep(self, request: Request) -> KvTransferParams:
        """Keep the records of a computed prompt for the engine that presents the returned
        ticket."""
        assert self._tickets is not None
        cache, host, prompt = self._cache, self._host, request.tokens[: request.num_prompt]
        most = int(cache.slots.complete_pages(len(prompt) - 1))
        found = cache.tree.match(prompt, most, request.marks)
        pages = found[: cache.resumable(found)]
        kept = host.keep(PAGE, [(page, page) for page in pages])
        if cache.window is not None:
            near, own = pages[-cache.window.reach :], cache.window.beside
            kept |= host.keep(WINDOW, [(page, own[page]) for page in near])
        if cache.states is not None and pages:
            kept |= host.keep(STATE, [(pages[-1], cache.states.beside[pages[-1]])])
        ticket = self._tickets.issue(kept)
        return KvTransferParams(
            do_remote_prefill=True,
            remote_engine_id=self._engine_id,
            remote_host=self._address[0],
            remote_port=self._address[1],
            remote_request_id=ticket.hex(),
        )

    def fetch(self, request: Request, asked: KvTransferParams) -> Future[Fetched]:
        """Fetch the records of a prompt that are neither on the device nor in host memory;
        `arrived` takes the result. Continuations of one prompt share a fetch."""
        assert self._receiver is not None
        peer, waiter = _peer_of(asked), Future[Fetched]()
        fetch = next((f for f in self._fetches if f.peer == peer), None)
        if fetch is None:
            # A ticket is used even if nothing is wanted: its records need not be kept any longer.
            wanted = self._wanted(request) if request.caches_prefix else []
            fetch = _Fetch(peer, wanted, self._receiver.fetch(peer, wanted))
            self._fetches.append(fetch)
        fetch.waiters.append(waiter)
        return waiter

    def arrived(self, fetched: Fetched) -> None:
        """Raise what ends a request whose records did not come: BadRequest where the peer serves
        another model, PeerFailed where it must not be computed here instead."""
        if fetched.refused:
            raise BadRequest(
                f"the engine that kv_transfer_params name has no records for this one: "
                f"{fetched.said}",
                "Start both with the same model and options",
            )
        if fetched.failure is not None and not self._recompute:
            raise PeerFailed(
                f"pages did not come from the engine that kv_transfer_params name: {fetched.said}",
                "Send the prompt again",
            )

    def poll(self) -> None:
        """Process finished fetches and ended tickets. Called between steps."""
        for fetch in [f for f in self._fetches if f.future.done()]:
            self._fetches.remove(fetch)
            self._settle(fetch, fetch.future.result())
        if self._tickets is not None:
            self._tickets.reap()

    def _settle(self, fetch: _Fetch, fetched: Fetched) -> None:
        arrived, lost = set(fetched.arrived), set(fetched.lost)
        for record in fetch.wanted:
            slots = self._host.slots[record.kind]
            if record in arrived:
                slots.keep(record.name, record.slot)
            elif record not in lost:
                slots.give_back(record.slot)
        if fetched.failure is not None:
            log.warning(
                "%d records did not come from %s:%d: %s",
                len(fetch.wanted) - len(arrived),
                fetch.peer.host,
                fetch.peer.port,
                fetched.said,
            )
        for waiter in fetch.waiters:
            if waiter.set_running_or_notify_cancel():
                if fetched.failure is not None:
                    self.failures[fetched.failure] += 1
                waiter.set_result(fetched)

    def _wanted(self, request: Request) -> list[Wanted]:
        """The records of a prompt that are neither on the device nor in host memory, limited to the
        places available."""
        cache, host, tokens = self._cache, self._host, request.tokens
        count = int(cache.slots.complete_pages(len(tokens) - 1))
        keys = page_keys(tokens, 0, count, cache.slots.tokens_per_page, request.marks)
        names = page_names(host.root, keys)
        found = cache.tree.match(tokens, count, request.marks)
        missing = [(PAGE, i) for i in range(len(found), count)]
        for kind, ledger, near in (
            (WINDOW, cache.window, cache.window.reach if cache.window else 0),
            (STATE, cache.states, 1),
        ):
            if ledger is not None:
                missing += [
                    (kind, i)
                    for i in range(max(0, count - near), count)
                    if i >= len(found) or found[i] not in ledger.beside
                ]
        for kind, i in reversed(missing):
            host.slots[kind].touch(names[i])
        wanted = []
        for kind, i in missing:
            if names[i] in host.slots[kind].kept:
                continue
            slot = host.slots[kind].take()
            if slot is None:
                break
            wanted.append(Wanted(kind, names[i], slot))
        return wanted


def _peer_of(asked: KvTransferParams) -> Peer:
    """The peer that has the records. Raises BadRequest if the request does not name it."""
    host, port, ticket = asked.remote_host, asked.remote_port, asked.remote_request_id
    try:
        if host and port and 0 < port < 65536 and ticket:
            return Peer(host, port, bytes.fromhex(ticket))
    except ValueError:
        pass
    raise BadRequest(
        "kv_transfer_params ask for do_remote_prefill, but remote_host, remote_port and "
        f"remote_request_id are {host!r}, {port!r} and {ticket!r}",
        "Pass on what the engine that prefilled answered",
    )
