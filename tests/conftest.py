"""Settings of all tests, and the device that they use."""

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
    # Kernels run on CPU tensors here, one program after the other. Child processes do not inherit
    # that: they need no kernels and start faster.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    interpreted = import_module("cairn.ops.gpu").INTERPRETED
    with suppress(ImportError):
        import_module("triton").knobs.runtime.interpret = interpreted
        quicken(import_module("triton.runtime.interpreter"))
    del os.environ["TRITON_INTERPRET"]

# On a busy machine an example may take long; the suite has its own time limits.
settings.register_profile("cairn", deadline=None)
settings.load_profile("cairn")

MANY = 1000
"""From this number of collected tests on, all CPU loops are compiled first."""


DEVICES = ["cpu"]
if torch.cuda.is_available():
    DEVICES.append(pytest.param("cuda", marks=pytest.mark.gpu))


# Session scope, because fixtures of modules and hypothesis require it.
@pytest.fixture(scope="session", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """A test with this fixture runs on the CPU, and in the GPU suite on the GPU."""
    name: str = request.param
    return name


if torch.cuda.is_available():

    @pytest.fixture(autouse=True)
    def counters_are_set_back(request: pytest.FixtureRequest) -> Iterator[None]:
        """The counters of launches are 0 after every test on a GPU, which the next launch relies
        on."""
        yield
        if request.node.get_closest_marker("gpu") is None:
            return
        arrivals = import_module("cairn.ops.grid_barrier")
        for index in range(torch.cuda.device_count()):
            torch.cuda.synchronize(index)
            store = arrivals._store(index)
            for memory in (*store._of_streams.values(), *store._blocks):
                left = memory.nonzero()
                # Engines allocate theirs without gradients.
                with torch.inference_mode():
                    memory.zero_()
                assert not len(left), f"counters {left[:4].tolist()} are not 0"


def pytest_collection(session: pytest.Session) -> None:
    """In the whole suite, the second of two workers imports the modules in reverse order. Without
    stored bytecode each then compiles one half and loads the other."""
    whole = session.config.args_source == pytest.Config.ArgsSource.TESTPATHS
    if whole and os.environ.get("PYTEST_XDIST_WORKER") == "gw1":
        folder = Path(__file__).parent
        for path in sorted(folder.rglob("test_*.py"), reverse=True):
            name = path.relative_to(folder.parent).with_suffix("").as_posix().replace("/", ".")
            # Import errors are reported at collection.
            with suppress(Exception, pytest.skip.Exception):
                import_module(name)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Before the first test: load the loops that many tests need, and freeze existing objects, so
    that garbage collections skip them."""
    if len(session.items) >= MANY and not torch.cuda.is_available():
        compile_a_share()
    gc.collect()
    gc.freeze()


def compile_a_share() -> None:
    """The first two workers each compile the loops of one dtype, and load those of the other later.

    The second one begins with other loops, because a loop that two processes store at the same time
    is lost.
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
    """Tests marked gpu are skipped without a GPU."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
