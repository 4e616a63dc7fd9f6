"""Prefill on one engine and decode on another give the results of one engine."""

from __future__ import annotations

import itertools
import re
import socket
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from cairn.cache.host import PAGE
from cairn.cache.invariants import check
from cairn.engine import build as built_by
from cairn.engine.build import Built
from cairn.engine.continuation import Continuation
from cairn.engine.transfer import nixl, peer_memory, sender
from cairn.engine.transfer.sender import Listener
from cairn.engine.transfer.tickets import Tickets
from cairn.engine.transfer.wire import Answer, send_frame
from cairn.errors import BadConfig, BadRequest
from cairn.types import KvTransferParams, SamplingParams
from tests.engine import ranked
from tests.engine.fakes import all_pages_back
from tests.engine.harness import assert_same, difference, greedy, run, text, trace
from tests.engine.test_families import FAMILIES, build
from tests.support import shows

LANDMARKS = "landmarks and windows"
PORT = {"disaggregation_bootstrap_port": 0}
KEEP = KvTransferParams(do_remote_decode=True)
NUMBERS = itertools.count()
STAGED = {
    "disaggregation_transfer_backend": "cuda",
    "disaggregation_staging_size": "4MiB",
    "kv_host_memory": None,
}


def options(family: str) -> dict:
    return {"page_size": 16} if family == "recurrent" else {}


def prefilling(family: str = LANDMARKS, **more) -> Built:
    mode = {"disaggregation_mode": "prefill", **PORT}
    return build(family, **{"kv_host_memory": "4MiB", **mode, **options(family), **more})


def decoding(family: str = LANDMARKS, **more) -> Built:
    more = {"disaggregation_mode": "decode", "kv_host_memory": "4MiB", **more}
    return build(family, **options(family), **more)


def serve(
    built: Built, prompt: list[int], params: SamplingParams, transfer: KvTransferParams | None
) -> list[Continuation]:
    """All outputs of a prompt."""
    core, name = built.core, next(NUMBERS)
    found = [
        core.add(f"{name}.{i}", prompt, params, index=i, transfer=transfer) for i in range(params.n)
    ]
    while core.has_work:
        core.step()
    return found


def prefilled(built: Built, prompt: list[int]) -> KvTransferParams:
    """The parameters that the prefilling engine returns."""
    (done,) = serve(built, prompt, SamplingParams(max_tokens=1, temperature=0), KEEP)
    assert done.transfer is not None
    return done.transfer


def settled(built: Built) -> None:
    """Nothing runs, and no page is leaked or held."""
    transfers = built.core.transfers
    deadline = time.monotonic() + 20
    while transfers.running or (transfers._tickets and len(transfers._tickets)):
        assert time.monotonic() < deadline
        transfers.poll()
        time.sleep(0.001)
    transfers.poll()
    check(built.core.cache, ())
    assert all_pages_back(built.core)
    assert not any(slots.taken or slots.held for slots in built.core.cache.host.slots)


@shows("hils qwen3_5", "PD")
@pytest.mark.parametrize("family", [LANDMARKS, "recurrent"])
def test_pages_of_another_engine_give_the_bits_of_a_warm_cache(family: str) -> None:
    first, second, alone = prefilling(family), decoding(family), build(family, **options(family))
    per_page, vocab = alone.core.cache.slots.tokens_per_page, alone.spec.vocab_size
    prompt = text(1, 4 * per_page + 3, vocab)
    run(alone, [prompt], greedy(6))
    warm = run(alone, [prompt], greedy(6))[0]
    (done,) = serve(second, prompt, greedy(6), prefilled(first, prompt))
    got = trace(done, vocab)
    assert got.cached == warm.cached == 4 * per_page
    assert got.tokens == warm.tokens and np.array_equal(got.logprobs, warm.logprobs)

    # The second engine does not fetch pages that it has cached, on the device or in host memory.
    longer = prompt + text(2, per_page, vocab)
    loaded = second.core.cache.host.loaded
    (done,) = serve(second, longer, greedy(6), prefilled(first, longer))
    assert done.request.cached == 5 * per_page
    assert second.core.cache.host.loaded <= loaded + 3
    assert trace(done, vocab).tokens == run(alone, [longer], greedy(6))[0].tokens
    assert not second.core.transfers.failures
    settled(first)
    settled(second)
    # Other weights, or other options that shape pages, have other pages.
    changes, differs = {
        LANDMARKS: ({"hsa_topk": 1}, "it has topk=4, this engine topk=1"),
        "recurrent": ({"load_format": "random"}, "it has weights=.*, this engine weights=random 0"),
    }[family]
    other = decoding(family, **changes)
    (failed,) = serve(other, prompt, greedy(6), prefilled(first, prompt))
    assert failed.status == 400 and re.search(f"serves another model.*: {differs}", failed.error)
    settled(other)


@pytest.fixture(scope="module")
def pair() -> tuple[Built, Built, Built]:
    """An engine that prefills, one that decodes, and one that does both."""
    return prefilling(), decoding(), build(LANDMARKS)


def prompt_of(built: Built) -> list[int]:
    """A prompt of several pages that no other test uses."""
    return text(100 + next(NUMBERS), 4 * built.core.cache.slots.tokens_per_page + 3)


def test_requests_of_all_kinds_are_those_of_one_engine(pair: tuple[Built, Built, Built]) -> None:
    first, second, alone = pair
    many = SamplingParams(n=3, seed=7, max_tokens=5, logprobs=2, ignore_eos=True)
    for params in (
        many,
        replace(many, n=1, presence_penalty=1.5, top_p=0.9),
        replace(many, n=1, prompt_logprobs=1),
        replace(many, n=1, max_tokens=1),
    ):
        prompt = prompt_of(alone)
        given = prefilled(first, prompt)
        got, expected = serve(second, prompt, params, given), serve(alone, prompt, params, None)
        for one, other in zip(got, expected, strict=True):
            assert one.stream.output.token_ids == other.stream.output.token_ids
        assert got[0].request.cached == (0 if params.prompt_logprobs else len(prompt) - 3)
    assert not second.core.transfers.failures
    settled(first)
    settled(second)


def failed_once(pair: tuple[Built, Built, Built], prompt: list[int], given, reason: str) -> int:
    """The request is served without the missing pages; returns the number of cached tokens."""
    _, second, alone = pair
    before = second.core.transfers.failures[reason]
    (done,) = serve(second, prompt, greedy(4), given)
    assert second.core.transfers.failures[reason] == before + 1
    assert done.stream.output.token_ids == run(alone, [prompt], greedy(4))[0].tokens
    settled(second)
    return done.request.cached


def test_prompts_whose_records_are_missing_are_recomputed(
    pair: tuple[Built, Built, Built], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, alone = pair
    prompts = [prompt_of(alone) for _ in range(7)]
    # A ticket can be used once.
    given = prefilled(first, prompts[0])
    serve(second, prompts[1], greedy(1), given)
    settled(first)
    assert failed_once(pair, prompts[0], given, "ticket") == 0
    # It expires and releases its pages.
    with monkeypatch.context() as patch:
        patch.setattr(first.core.transfers, "_tickets", Tickets(first.core.cache.host, 0.0))
        given = prefilled(first, prompts[2])
        settled(first)
    assert failed_once(pair, prompts[2], given, "ticket") == 0
    # A record changes in the memory of the prefilling engine.
    given = prefilled(first, prompts[3])
    (_, slot), *_ = reversed(first.core.cache.host.slots[PAGE].kept.items())
    first.core.executor.records.record(PAGE, slot)[3] ^= 1
    # Window pages belong to the end of the whole prompt, so no shorter prefix can be resumed.
    assert failed_once(pair, prompts[3], given, "damaged") == 0
    # A record is missing.
    given = prefilled(first, prompts[4])
    ticket = first.core.transfers._tickets._open[bytes.fromhex(given.remote_request_id)]
    kind, name = next(key for key in ticket.records if key[0] == PAGE)
    first.core.cache.host.slots[kind].release(ticket.records.pop((kind, name)))
    assert failed_once(pair, prompts[4], given, "missing") == 0
    settled(first)
    # Nothing listens at the address.
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = replace(given, remote_port=free.getsockname()[1])
    assert failed_once(pair, prompts[5], nobody, "connection") == 0
    # It closes the connection during the transfer, which is an error with
    # --disaggregation-load-failure fail.
    with socket.create_server(("127.0.0.1", 0)) as server:
        leaving = replace(given, remote_port=server.getsockname()[1])
        monkeypatch.setattr(second.core.transfers, "_recompute", False)
        core = second.core
        done = core.add("gone", prompts[6], greedy(4), transfer=leaving)
        connection, _ = server.accept()
        send_frame(connection, Answer([0] * 9), b"")
        connection.sendall(b"\0" * 100)
        connection.close()
        while core.has_work:
            core.step()
    assert done.status == 503 and "Send the prompt again" in done.error
    settled(second)


def test_a_secret_is_shared_or_nothing_is(
    pair: tuple[Built, Built, Built], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _, alone = pair
    monkeypatch.setenv("CAIRN_CLUSTER_SECRET", "of another cluster")
    prompt, tickets = prompt_of(alone), first.core.transfers._tickets
    given = prefilled(first, prompt)
    assert failed_once((first, decoding(), alone), prompt, given, "secret") == 0
    # That did not consume the ticket.
    assert tickets.claim(bytes.fromhex(given.remote_request_id)) is not None
    tickets.end(bytes.fromhex(given.remote_request_id))
    settled(first)


@pytest.mark.parametrize("count", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_aborts_leak_nothing(pair: tuple[Built, Built, Built], count: int) -> None:
    first, second, alone = pair
    for number in range(count):
        prompt = prompt_of(alone)
        given = prefilled(first, prompt)
        done = second.core.add(f"abort {number}", prompt, greedy(4), transfer=given)
        for _ in range(number % 4):
            second.core.step()
        second.core.abort(done.request.id)
        while second.core.has_work:
            second.core.step()
    settled(first)
    settled(second)


@shows("hils", "PD")
@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        (LANDMARKS, (2, 1)),
        pytest.param(LANDMARKS, (1, 2), marks=pytest.mark.slow),
        *(
            pytest.param(family, ranks, marks=pytest.mark.slow)
            for family in ("recurrent", "latent, shared selections", "recurrent with experts")
            for ranks in ((2, 1), (1, 2))
        ),
    ],
)
def test_peers_may_have_different_numbers_of_ranks(family: str, ranks: tuple[int, int]) -> None:
    folder, alone = FAMILIES[family], build(family, **options(family))
    given = options(family) | {"kv_host_memory": "4MiB"}
    sizes = dict(zip(("prefill", "decode"), ranks, strict=True))
    first, second = (
        ranked.engine(folder, size, disaggregation_mode=mode, **PORT, **given)
        for mode, size in sizes.items()
    )
    per_page, vocab = alone.core.cache.slots.tokens_per_page, alone.spec.vocab_size
    for seed in (1, 2):
        prompt = text(seed, 4 * per_page + 3, vocab)
        (done,) = serve(second, prompt, greedy(6), prefilled(first, prompt))
        got, wanted = trace(done, vocab), run(alone, [prompt], greedy(6))[0]
        assert got.cached == 4 * per_page and got.tokens == wanted.tokens
        assert difference(got.logprobs, wanted.logprobs) < 2e-4
    assert not second.core.transfers.failures
    settled(first)
    settled(second)


ASKS = """
import sys, time
from cairn.engine.transfer.wire import *
host, port, model, ticket, names = sys.argv[1:]
connection = socket.socket()
connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
connection.connect((host, int(port)))
wanted = [(0, bytes.fromhex(name)) for name in names.split(",")]
send_frame(connection, Ask(VERSION, bytes.fromhex(model), bytes.fromhex(ticket), wanted), b"")
print("asked", flush=True)
time.sleep(60)
"""


def test_one_that_is_killed_while_it_takes_pages_holds_nothing(
    pair: tuple[Built, Built, Built], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, alone = pair
    core, prompt = first.core, prompt_of(alone)
    given = prefilled(first, prompt)
    tickets = core.transfers._tickets
    name = bytes.fromhex(given.remote_request_id)
    # More than the system buffers for a connection that nobody reads.
    names = [key.hex() for kind, key in tickets._open[name].records if kind == PAGE] * 40
    told = ["127.0.0.1", str(given.remote_port), core.cache.host.root.hex(), name.hex()]
    process = subprocess.Popen(
        [sys.executable, "-c", ASKS, *told, ",".join(names)], stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"asked\n"
    time.sleep(0.2)
    core.transfers.poll()
    assert tickets._open[name].used and any(slots.held for slots in core.cache.host.slots)
    process.kill()
    process.wait()
    began = time.monotonic()
    settled(first)
    assert time.monotonic() - began < 5
    # The next one is served.
    (done,) = serve(second, prompt, greedy(2), prefilled(first, prompt))
    assert done.request.cached == len(prompt) - 3
    settled(second)


def test_records_are_read_by_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if only one of the two engines has it: then pages are sent over TCP."""
    pytest.importorskip("nixl_cu13")
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    alone, by_nixl = build(LANDMARKS), {"disaggregation_transfer_backend": "nixl"}
    first, second, other = prefilling(**by_nixl), decoding(**by_nixl), decoding()
    read: list[int] = []
    inner = second.core.transfers._receiver._agent.read
    monkeypatch.setattr(
        second.core.transfers._receiver._agent,
        "read",
        lambda *given: (read.append(len(given[1])), inner(*given)),
    )
    for taker in (second, other, second):
        prompt = prompt_of(alone)
        (done,) = serve(taker, prompt, greedy(4), prefilled(first, prompt))
        assert_same(trace(done, alone.spec.vocab_size), run(alone, [prompt], greedy(4))[0])
        assert done.request.cached
        settled(taker)
    # What is known already is not read.
    serve(second, prompt, greedy(4), prefilled(first, prompt))
    assert len(read) == 2 and all(read) and not second.core.transfers.failures
    settled(second)
    settled(first)


def test_records_in_gpu_memory_are_read_in_place(
    pair: tuple[Built, Built, Built], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines on the same host fetch them; others compute the prompt."""
    shared: list[torch.Tensor] = []

    def share(rows: torch.Tensor) -> peer_memory.Shared:
        shared.append(rows)
        return peer_memory.Shared(*rows.shape, bytes([len(shared)]))

    monkeypatch.setattr(peer_memory, "share", share)
    monkeypatch.setattr(peer_memory, "opened", lambda given, device: shared[given.handle[0] - 1])
    with pytest.raises(BadConfig, match="takes one GPU, but device is cpu"):
        decoding(**STAGED)
    plain, other, alone = pair
    listening = {True: Listener, False: lambda asked: None}
    monkeypatch.setattr(
        built_by, "listen", lambda c: listening[c.disaggregation.sends](c.disaggregation)
    )
    first, second = prefilling(**STAGED), decoding(**STAGED)
    # The first engine's places are not consecutive, so that several ranges are read.
    host = first.core.cache.host
    some = [host.slots[PAGE].take() for _ in range(5)]
    for slot in (some[1], some[4], some[0]):
        host.slots[PAGE].give_back(slot)
    prompt = prompt_of(alone)
    (done,) = serve(second, prompt, greedy(4), prefilled(first, prompt))
    assert_same(trace(done, alone.spec.vocab_size), run(alone, [prompt], greedy(4))[0])
    # What is known already is not read.
    agent = second.core.transfers._receiver._agent
    with monkeypatch.context() as patch:
        patch.setattr(agent, "read", lambda *given: pytest.fail("it reads nothing"))
        serve(second, prompt, greedy(4), prefilled(first, prompt))
    assert done.request.cached and not second.core.transfers.failures
    for slot in (some[2], some[3]):
        host.slots[PAGE].give_back(slot)
    # Records that are not held until they have been read are not used.
    with monkeypatch.context() as patch:
        copy = peer_memory._copy
        patch.setattr(sender, "READ_SECONDS", 0.01)
        patch.setattr(peer_memory, "_copy", lambda *given: (time.sleep(0.05), copy(*given)))
        prompt = prompt_of(alone)
        given = prefilled(first, prompt)
        assert failed_once((first, second, alone), prompt, given, "connection") == 0
    # The peer may have ended: nothing of its memory stays mapped.
    assert not second.core.transfers._receiver._agent._opened
    settled(first)
    for taker, giver in ((other, first), (second, plain)):
        prompt = prompt_of(alone)
        (done,) = serve(taker, prompt, greedy(4), prefilled(giver, prompt))
        assert_same(trace(done, alone.spec.vocab_size), run(alone, [prompt], greedy(4))[0])
        assert not done.request.cached and taker.core.transfers.failures["backend"]
        settled(taker)
        settled(giver)


def test_impossible_transfers_are_refused(
    pair: tuple[Built, Built, Built], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, alone = pair
    prompt, params = [1, 2, 3], greedy(1)
    with pytest.raises(BadRequest, match="this one works alone"):
        alone.core.add("r", prompt, params, transfer=KEEP)
    with pytest.raises(BadRequest, match="keeps no pages for others"):
        second.core.add("r", prompt, params, transfer=KEEP)
    take = KvTransferParams(do_remote_prefill=True, remote_host="h", remote_port=5)
    with pytest.raises(BadRequest, match="takes no pages of others"):
        first.core.add("r", prompt, params, transfer=take)
    with pytest.raises(BadRequest, match="'h', 5 and None.*Pass on"):
        second.core.add("r", prompt, params, transfer=take)
    elsewhere = replace(take, remote_host="198.51.100.7", remote_request_id="00")
    with pytest.raises(BadRequest, match="'198.51.100.7', but without a secret.*CAIRN_CLUSTER"):
        second.core.add("r", prompt, params, transfer=elsewhere)
    assert not second.core.has_work
    monkeypatch.setattr(nixl, "MODULES", ())
    for changes, message in (
        ({"disaggregation_mode": "half"}, "disaggregation_mode is 'half'"),
        ({"kv_host_memory": None}, "kv_host_memory gives none"),
        ({"disaggregation_transfer_backend": "nixl"}, "nixl, which is not installed"),
        ({"disaggregation_transfer_backend": "cuda"}, "pages in GPU memory, but kv_host_memory"),
        ({"disaggregation_staging_size": "1MiB"}, "with the transfer backend tcp pages are in"),
        ({"disaggregation_bootstrap_port": 70000}, "disaggregation_bootstrap_port is 70000"),
        ({"disaggregation_mode": None, **PORT}, "port is 0, but disaggregation_mode is null"),
        (
            {"tensor_parallel_size": 2, "nnodes": 2, "dist_init_addr": "127.0.0.1:5"},
            "nnodes is 2, but records of several hosts",
        ),
        (
            {"disaggregation_mode": "both", "disaggregation_bootstrap_host": "0.0.0.0"},
            "Set CAIRN_CLUSTER_SECRET",
        ),
    ):
        with pytest.raises(BadConfig, match=message):
            decoding(**changes)
    taken = first.core.transfers._address[1]
    with pytest.raises(BadConfig, match=rf"port {taken} .*--disaggregation-bootstrap-port"):
        decoding(disaggregation_mode="prefill", disaggregation_bootstrap_port=taken)
