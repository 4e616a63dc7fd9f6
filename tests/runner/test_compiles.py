"""Kernels are compiled per model, not per length."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from cairn import LLM, SamplingParams

LONGEST = 4000


class Compiled:
    """Kernels that Triton compiles or loads from its cache, each with its specialization."""

    def __init__(self) -> None:
        self.known: dict[str, list[dict[str, str]]] = {}
        self.latest: list[str] = []

    def __call__(self, *, fn, compile, **other) -> None:
        (aligned,) = compile["configs"]
        form = {"warps": str(compile["num_warps"]), "stages": str(compile["num_stages"])}
        for i, (name, kind) in enumerate(compile["signature"].items()):
            value = compile["constants"].get((i,), "of 16" if (i,) in aligned else "any")
            form[name] = f"{kind} {value}"
        earlier = self.known.setdefault(fn.name, [])
        changes = [
            [f"{n} {one.get(n)} -> {form[n]}" for n in form if one.get(n) != form[n]]
            for one in earlier
        ]
        earlier.append(form)
        self.latest.append(f"{fn.name}: {', '.join(min(changes, key=len, default=['new']))}")


@pytest.fixture
def compiled(monkeypatch) -> Compiled:
    """Start to record."""
    runtime = pytest.importorskip("triton").knobs.runtime
    found = Compiled()
    monkeypatch.setattr(runtime, "jit_cache_hook", found)
    return found


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def llm(request) -> Iterator[LLM]:
    llm = LLM(device="cuda", dtype=request.param, max_num_seqs=8, max_model_len=2 * LONGEST,
              kv_cache_memory="512MiB")  # fmt: skip
    yield llm
    llm.shutdown()


def answer(llm: LLM, rng: random.Random, lengths: list[int]) -> None:
    given = [{"prompt_token_ids": [rng.randrange(256) for _ in range(n)]} for n in lengths]
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    llm.generate(given, params, use_tqdm=False)


@pytest.mark.gpu
def test_fifty_lengths_compile_nothing_after_warm_up(llm, compiled):
    """Steps of few and of many tokens first, alone and after those of a row that selects all pages;
    then any others, alone and together."""
    rng = random.Random(3)
    early = int(llm._built.slots.tokens_in(llm._built.runner.front_slots[0]))
    powers = [2**n for n in range(2, 12)]
    for length in (
        1,
        2,
        3,
        *(n + i for n in powers for i in (-1, 0, 1)),
        *(early + n for n in powers),
    ):
        answer(llm, rng, [length])
    for rows in range(2, 9):
        answer(llm, rng, [rng.randrange(1, 300) for _ in range(rows)])
    assert compiled.latest, "the hook sees nothing"
    compiled.latest.clear()
    lengths = rng.sample(range(5, LONGEST), 50)
    for length in lengths[:20]:
        answer(llm, rng, [length])
    for at in range(20, 50, 6):
        answer(llm, rng, lengths[at : at + 6])
    assert not compiled.latest, "\n".join(compiled.latest)
