"""Images on a GPU: the results of the CPU, with graphs and overlap."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cairn.engine.build import Built
from tests.engine.harness import Limits, difference, trace
from tests.engine.test_images import image, prompt, seeing, start
from tests.seeing import write

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("seeing"))


def with_weights_of(built: Built, other: Built) -> Built:
    """The engine with the weights of another one, because random weights depend on the device."""
    built.runner.model.load_state_dict(other.runner.model.state_dict())
    return built


def test_embeddings_are_the_cpus(folder: Path) -> None:
    cpu = seeing(folder)
    gpu = with_weights_of(seeing(folder, device="cuda"), cpu)
    for seed, size in enumerate([(40, 56), (16, 200), (64, 64)]):
        pixels = torch.from_numpy(image(seed, *size).item.array().copy())
        with torch.inference_mode():
            wanted, found = (built.runner.model.encode(pixels) for built in (cpu, gpu))
        assert (found.cpu() - wanted).abs().max() < 1e-3 * wanted.abs().max()


@pytest.mark.parametrize("drafts", [0, 2])
def test_answers_are_the_cpus(folder: Path, drafts: int) -> None:
    """Prompts with and without images, together, in chunks, and twice."""
    cpu = seeing(folder)
    options = {"speculative_algorithm": "NEXTN", "speculative_num_steps": drafts} if drafts else {}
    gpu = seeing(folder, device="cuda", max_num_seqs=4, **options)
    state = cpu.runner.model.state_dict()
    gpu.runner.model.load_state_dict(state, strict=not drafts)
    given = [prompt(7, image(1), 30), prompt(20), prompt(5, image(2), 9, image(1), 4)]
    wanted = []
    for one in given:
        live = start(cpu, one, 12)
        while cpu.core.has_work:
            cpu.core.step()
        wanted.append(trace(live, cpu.spec.vocab_size))
    for budget in (4096, 24, 4096):
        gpu.core.scheduler.limits = Limits(4, budget)
        several = [start(gpu, one, 12) for one in given]
        while gpu.core.has_work:
            gpu.core.step()
        for live, expected in zip(several, wanted, strict=True):
            got = trace(live, gpu.spec.vocab_size)
            assert got.tokens == expected.tokens
            assert difference(got.logprobs, expected.logprobs) < 2e-3
