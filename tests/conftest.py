"""Settings of every test, and the device it computes on."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests.interpreting import quicken

if not torch.cuda.is_available():
    # Kernels run on CPU tensors here, one program after the other. Processes that tests start do
    # not inherit that: they need no kernels, and are ready sooner.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    interpreted = import_module("cairn.ops.gpu").INTERPRETED
    with suppress(ImportError):
        import_module("triton").knobs.runtime.interpret = interpreted
        quicken(import_module("triton.runtime.interpreter"))
    del os.environ["TRITON_INTERPRET"]

# A busy machine may take long over one example; the suite has its own time limits.
settings.register_profile("cairn", deadline=None)
settings.load_profile("cairn")

MANY = 1000
"""So many tests surely need all of the CPU's loops."""


DEVICES = ["cpu"]
if torch.cuda.is_available():
    DEVICES.append(pytest.param("cuda", marks=pytest.mark.gpu))


# Of the session's scope: fixtures of a module, and hypothesis, take no narrower one.
@pytest.fixture(scope="session", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """A test that takes this runs on the CPU, and in the GPU suite on the GPU."""
    name: str = request.param
    return name


if torch.cuda.is_available():

    @pytest.fixture(autouse=True)
    def counters_are_set_back(request: pytest.FixtureRequest) -> Iterator[None]:
        """What launches count by is 0 behind every test on a GPU: the next launch relies on it."""
        yield
        if request.node.get_closest_marker("gpu") is None:
            return
        arrivals = import_module("cairn.ops.grid_barrier")
        for index in range(torch.cuda.device_count()):
            torch.cuda.synchronize(index)
            store = arrivals._store(index)
            for memory in (*store._of_streams.values(), *store._kept):
                left = memory.nonzero()
                # Engines take theirs where gradients are not kept.
                with torch.inference_mode():
                    memory.zero_()
                assert not len(left), f"counters {left[:4].tolist()} are not 0"


def pytest_collection(session: pytest.Session) -> None:
    """Of the whole suite the second of two workers imports the modules from the last to the first.
    Where no bytecode is kept each then compiles a half, and loads what the other has compiled."""
    whole = session.config.args_source == pytest.Config.ArgsSource.TESTPATHS
    if whole and os.environ.get("PYTEST_XDIST_WORKER") == "gw1":
        folder = Path(__file__).parent
        for path in sorted(folder.rglob("test_*.py"), reverse=True):
            name = path.relative_to(folder.parent).with_suffix("").as_posix().replace("/", ".")
            # What cannot be imported is told where it is collected.
            with suppress(Exception, pytest.skip.Exception):
                import_module(name)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Before the first test: loops that many need, and what is there by now stays, so that the
    collector need not look at it again and again."""
    if len(session.items) >= MANY and not torch.cuda.is_available():
        compile_a_share()
    gc.collect()
    gc.freeze()


def compile_a_share() -> None:
    """Each of the first two workers compiles the loops for another dtype, of which each takes most
    of a minute where none are kept; later they find each other's. Otherwise both would compile all.
    The second begins with other loops: what two processes keep of one at the same time is lost.
    """
    dtypes = {"gw0": torch.float32, "gw1": torch.bfloat16}
    dtype = dtypes.get(os.environ.get("PYTEST_XDIST_WORKER", ""))
    if dtype is None or not import_module("cairn.ops.cpu").AVAILABLE:
        return
    module = import_module("cairn.ops.compile_loops")
    if dtype == torch.bfloat16:
        module.compile_landmarks(dtype)
    module.compile_loops(dtype, helped=False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is marked gpu is skipped where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
