"""Records between a GPU and host memory, and a group of one rank over NCCL."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from subprocess import PIPE, Popen

import msgspec
import numpy as np
import pytest
import torch

from cairn.cache.host import PAGE, STATE, Move
from cairn.config import EngineOptions, resolve
from cairn.distributed.groups import Group
from cairn.distributed.rendezvous import group_of, hold_store
from cairn.engine import build as module
from cairn.engine.build import Built
from cairn.engine.transfer import peer_memory
from cairn.models.registry import load_spec
from cairn.types import KvTransferParams
from tests.engine import test_host_cache, test_transfer
from tests.engine.harness import assert_same, greedy, run, text, trace
from tests.engine.test_families import FAMILIES, build
from tests.engine.test_transfer import LANDMARKS, prefilled, serve, settled
from tests.support import shows

pytestmark = pytest.mark.gpu
CUDA = {"device": "cuda", "disable_cuda_graph": True}
KINDS = [LANDMARKS, "recurrent", "latent, shared selections"]


def made(family: str, **options) -> Built:
    small = {"page_size": 16} if family == "recurrent" else {}
    return build(family, kv_host_memory="8MiB", **CUDA, **small, **options)


@pytest.mark.parametrize("family", KINDS)
def test_records_come_back_bit_for_bit(family: str) -> None:
    built = made(family)
    records, pools = built.core.executor.records, built.runner.pools
    for kind in (PAGE, STATE):
        places = min(3, records.counts[kind])
        if not places:
            continue
        first = pools.first_snapshot if kind == STATE else 0
        index = torch.arange(first, first + places, device="cuda")
        tensors = list(pools.states() if kind == STATE else pools.tensors(group=0))
        # Bit patterns that are NaN, too.
        kept = []
        with torch.inference_mode():
            for tensor in tensors:
                raw = torch.randint(0, 256, tensor[index].view(torch.uint8).shape, device="cuda")
                tensor[index] = raw.to(torch.uint8).view(tensor.dtype)
                kept.append(tensor[index].clone())
            moves = [Move(kind, place, places - 1 - place) for place in range(places)]
            assert records.move(moves, True) == []
            for tensor in tensors:
                tensor[index] = 0
            assert records.move(moves, False) == []
            for tensor, wanted in zip(tensors, kept, strict=True):
                found = tensor[index]
                assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


@shows("hils qwen3_5 glm_moe_dsa", "host prefix cache")
@pytest.mark.parametrize("family", KINDS)
def test_a_prefix_from_host_memory_gives_the_bits_of_one_on_the_device(family: str) -> None:
    built = made(family)
    core = built.core
    per_page = core.cache.slots.tokens_per_page
    prompt = text(1, 4 * per_page + 3, built.spec.vocab_size)
    run(built, [prompt], greedy(6))
    warm = run(built, [prompt], greedy(6))[0]
    assert warm.cached == 4 * per_page and not core.cache.host.loaded
    test_host_cache.give_up_all(built)
    test_host_cache.assert_same_bits(run(built, [prompt], greedy(6))[0], warm)
    assert core.cache.host.loaded and not core.cache.host.damaged


@shows("hils qwen3_5", "PD")
@pytest.mark.parametrize("family", [LANDMARKS, "recurrent"])
def test_pages_of_another_engine_on_the_same_gpu(family: str) -> None:
    first, second = test_transfer.prefilling(family, **CUDA), test_transfer.decoding(family, **CUDA)
    alone = made(family)
    per_page, vocab = alone.core.cache.slots.tokens_per_page, alone.spec.vocab_size
    prompt = text(1, 4 * per_page + 3, vocab)
    run(alone, [prompt], greedy(6))
    warm = run(alone, [prompt], greedy(6))[0]
    (done,) = serve(second, prompt, greedy(6), prefilled(first, prompt))
    got = test_transfer.trace(done, vocab)
    assert got.cached == warm.cached == 4 * per_page
    assert got.tokens == warm.tokens and np.array_equal(got.logprobs, warm.logprobs)
    settled(first)
    settled(second)


PREFILLS = """
import json, sys
import msgspec
from tests.engine.test_records_gpu import CUDA, LANDMARKS
from tests.engine.test_transfer import STAGED, prefilled, prefilling
first = prefilling(LANDMARKS, **STAGED, **CUDA)
for line in sys.stdin:
    print(msgspec.json.encode(prefilled(first, json.loads(line))).decode(), flush=True)
"""


def test_pages_in_gpu_memory_of_another_process() -> None:
    alone = made(LANDMARKS)
    second = test_transfer.decoding(LANDMARKS, **test_transfer.STAGED, **CUDA)
    per_page, vocab = alone.core.cache.slots.tokens_per_page, alone.spec.vocab_size
    command = [sys.executable, "-c", PREFILLS]
    with Popen(command, stdin=PIPE, stdout=PIPE, text=True) as first:
        assert first.stdin is not None and first.stdout is not None
        for seed in (1, 2):
            prompt = text(seed, 4 * per_page + 3, vocab)
            print(json.dumps(prompt), file=first.stdin, flush=True)
            given = msgspec.json.decode(first.stdout.readline(), type=KvTransferParams)
            (done,) = serve(second, prompt, greedy(6), given)
            assert done.request.cached == 4 * per_page
            assert_same(trace(done, vocab), run(alone, [prompt], greedy(6))[0])
        first.stdin.close()
    settled(second)


def test_a_process_that_is_killed_during_a_read_is_done_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its memory may be another's already: nothing that was read of it is used."""
    alone = made(LANDMARKS)
    second = test_transfer.decoding(LANDMARKS, **test_transfer.STAGED, **CUDA)
    per_page, vocab = alone.core.cache.slots.tokens_per_page, alone.spec.vocab_size
    prompts = [text(seed, 40 * per_page + 3, vocab) for seed in (1, 2, 3)]
    copy = peer_memory._copy
    with Popen([sys.executable, "-c", PREFILLS], stdin=PIPE, stdout=PIPE, text=True) as first:

        def killing(rows, slots, theirs, sources):
            half = len(slots) // 2
            copy(rows, slots[:half], theirs, sources[:half])
            torch.cuda.synchronize()
            if half:
                first.kill()
                first.wait()
            copy(rows, slots[half:], theirs, sources[half:])

        assert first.stdin is not None and first.stdout is not None
        for prompt, read, cached in zip(prompts, (copy, killing), (40, 0), strict=False):
            monkeypatch.setattr(peer_memory, "_copy", read)
            print(json.dumps(prompt), file=first.stdin, flush=True)
            given = msgspec.json.decode(first.stdout.readline(), type=KvTransferParams)
            (done,) = serve(second, prompt, greedy(6), given)
            assert done.request.cached == cached * per_page
            assert_same(trace(done, vocab), run(alone, [prompt], greedy(6))[0])
            settled(second)
    # The next prompt is for the same peer, which is gone.
    (done,) = serve(second, prompts[2], greedy(6), given)
    assert_same(trace(done, vocab), run(alone, [prompts[2]], greedy(6))[0])
    assert second.core.transfers.failures == {"connection": 2}
    settled(second)


class Lone(Group):
    """One rank that calls all collectives."""

    @property
    def alone(self) -> bool:
        return False


def test_a_group_of_one_over_nccl() -> None:
    device = torch.device("cuda", 0)
    over_nccl = group_of(hold_store(), 0, 1, device)
    assert type(over_nccl.backend).__name__ == "ProcessGroupNCCL"
    group = Lone(0, 1, over_nccl.backend)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(7, 33, device=device).to(dtype)
        assert torch.equal(group.sum(x.clone()), x)
        assert torch.equal(group.gathered(x)[0], x)
    assert group.least(5, device) == 5
    folder = Path(FAMILIES["experts"])
    given = {"dtype": "float32", "kv_cache_memory": "8MiB", "max_num_seqs": 4}
    options = EngineOptions(**CUDA, **given)
    config = resolve(options, load_spec(folder), module.this_machine("cuda"))
    loaded = module.load_runner(folder, options, config, group)
    divided = module._assemble(folder, config, loaded, None, lambda name: None)
    alone = module.build(folder, options)
    prompts = [text(1, 70, alone.spec.vocab_size), text(2, 3, alone.spec.vocab_size)]
    found, wanted = (
        run(each, prompts, greedy(4, True), [50], poisoned=False) for each in (divided, alone)
    )
    for mine, its in zip(found, wanted, strict=True):
        assert_same(mine, its)
