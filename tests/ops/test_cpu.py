"""Number formats, rounding and exp in compiled loops."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from cairn import ops
from cairn.ops import cpu
from cairn.ops.cpu import avx512

pytestmark = pytest.mark.skipif(not cpu.AVAILABLE, reason="Numba is not installed")
FORMATS = [torch.float32, torch.bfloat16, torch.float16]


@cpu.jit(threads=True)
def widened(given, out):
    for i in cpu.prange(len(given)):
        out[i] = cpu.wide(given[i])


@cpu.jit(threads=True)
def narrowed(given, out):
    for i in cpu.prange(len(given)):
        out[i] = cpu.narrow(given[i], out[i])


@cpu.jit(threads=True)
def powers(given, out):
    for i in cpu.prange(len(given)):
        out[i] = cpu.exp(given[i])


def edges() -> torch.Tensor:
    """Numbers of all sizes, halfway cases, zeros, subnormal ones, infinities and NaN."""
    torch.manual_seed(3)
    bits = torch.randint(-(2**31), 2**31, (20000,), dtype=torch.int64).to(torch.int32)
    halves = (torch.arange(4096, dtype=torch.int32) << 15) + 0x3F000000
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, 65519.9, 65520.0])
    return torch.cat((bits.view(torch.float32), halves.view(torch.float32), special))


@pytest.mark.parametrize("dtype", FORMATS)
def test_every_number_of_a_format_is_read_as_it_is(dtype: torch.dtype) -> None:
    given = edges().to(dtype)
    out = torch.empty(given.shape)
    widened(cpu.as_array(given), cpu.as_array(out))
    torch.testing.assert_close(out, given.float(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(out.signbit() | out.isnan(), given.float().signbit() | given.isnan())


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("in_one", [True, False])
def test_products_of_sixteen_lanes(dtype: torch.dtype, in_one: bool, monkeypatch) -> None:
    """From any offset, with and without the CPU's bfloat16 instruction."""
    if not in_one:
        monkeypatch.setattr(avx512, "PAIRS", False)

    def dot(a, i, b, j, out):
        for n in cpu.prange(len(out)):
            first = avx512.add_products(avx512.spread(out[n]), a, i + n, b, j)
            out[n] = avx512.total(avx512.add_products(first, a, i + n + 32, b, j + 32))

    torch.manual_seed(0)
    a, b, out = torch.randn(90).to(dtype), torch.randn(69).to(dtype), torch.full((3,), 2.0)
    cpu.jit(dot, threads=True)(cpu.as_array(a), 5, cpu.as_array(b), 3, cpu.as_array(out))
    shown = [a[5 + n : 69 + n].double() @ b[3:67].double() + 32 for n in range(3)]
    torch.testing.assert_close(out, torch.stack(shown).float())


@pytest.mark.parametrize("dtype", FORMATS)
def test_numbers_are_rounded_as_torch_rounds(dtype: torch.dtype) -> None:
    given = edges()
    out = torch.empty(given.shape, dtype=dtype)
    narrowed(cpu.as_array(given), cpu.as_array(out))
    torch.testing.assert_close(out, given.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_powers_of_e() -> None:
    given = torch.cat((torch.linspace(-90, 88, 200001), torch.tensor([-torch.inf, torch.nan, 0.0])))
    out = torch.empty_like(given)
    powers(cpu.as_array(given), cpu.as_array(out))
    known = given > -87
    torch.testing.assert_close(
        out[known].double(), given[known].double().exp(), rtol=3e-7, atol=0, equal_nan=True
    )
    assert out[given <= -87].eq(0).all()
    assert out[-2].isnan() and out[-1] == 1


def test_a_line_is_the_memory_of_a_tensor() -> None:
    whole = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).view(2, 3, 4, 5)
    assert np.array_equal(cpu.line(whole), np.arange(120))
    part = whole[:, :, -1]
    line = cpu.line(part)
    for page, head in np.ndindex(2, 3):
        at = page * part.stride(0) + head * part.stride(1)
        assert np.array_equal(line[at : at + 5], part[page, head])
    line[0] = -1
    assert part[0, 0, 0] == -1
    assert cpu.line(part[:0]).size == 0


@pytest.mark.parametrize("dtype", FORMATS[:2])
def test_parameters_need_not_be_detached(dtype: torch.dtype) -> None:
    x = torch.randn(2, 8, dtype=dtype)
    norm, weight = (torch.nn.Parameter(torch.randn(*n, 8, dtype=dtype)) for n in ((), (4,)))
    wanted = ops.linear(x, weight.detach(), None, norm.detach())
    assert torch.equal(ops.linear(x, weight, None, norm), wanted)
    assert ops.rmsnorm(x, norm).shape == x.shape


def test_without_numba_the_definitions_serve() -> None:
    code = """
import sys
sys.modules["numba"] = None
import torch
from cairn import ops
from cairn.ops import cpu
from cairn.ops.cpu import avx512
assert not cpu.AVAILABLE and not cpu.DEVICES
x, weight = torch.randn(1, 8), torch.randn(4, 8)
torch.testing.assert_close(ops.linear(x, weight), x @ weight.T)
assert ops.linear.choice(x, weight) == "composed"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_loops_run_on_several_threads_where_torch_has_them() -> None:
    code = """
import importlib.util
import torch
from cairn import ops
from cairn.ops import cpu
assert cpu.PARALLEL == (importlib.util.find_spec("numba.np.ufunc.omppool") is not None)
x, weight = torch.randn(301, 64), torch.randn(64)
for op, given in ((ops.rmsnorm, (x, weight)), (ops.silu_and_mul, (x,))):
    torch.testing.assert_close(op.using("numba")(*given), op.using("reference")(*given))
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200, env=environment)


def test_cached_loops_depend_on_all_files_of_loops(tmp_path, monkeypatch) -> None:
    """Numba checks only the file of the function itself."""
    names = ("cpu/__init__.py", "cpu/avx512.py", "norm/loops.py", "attention/tile_loops.py")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("a = 1")
    assert powers._cache._cache_file._source_stamp == cpu._sources()
    monkeypatch.setattr(cpu, "__file__", str(tmp_path / "cpu" / "__init__.py"))
    for name in names:
        before = cpu._sources.__wrapped__()
        (tmp_path / name).write_text("a = 22")
        assert cpu._sources.__wrapped__() != before


NORMS = """
import zlib
import numpy as np
from cairn.ops.cpu import jit, prange

@jit
def norm(x, weight, row):
    square = np.float32(0)
    for i in range(len(x)):
        row[i] = x[i]
        square += row[i] * row[i]
    factor = np.float32(1) / np.sqrt(square)
    for i in range(len(x)):
        row[i] = row[i] * factor * weight[i]

@jit(threads=True)
def norms(x, weight, out):
    for n in prange(len(x)):
        row = np.empty(x.shape[1], np.float32)
        norm(x[n], weight, row)
        for i in range(len(row)):
            out[n, i] = row[i]

def run():
    given = np.random.default_rng(0).standard_normal((50, 100), np.float32)
    out = np.empty_like(given)
    norms(given, given[0], out)
    return zlib.crc32(out)

if __name__ == "__main__":
    print(run(), len(norms.stats.cache_hits))
"""


def test_loops_from_disk_give_the_same_numbers_as_where_they_were_compiled(
    tmp_path, monkeypatch
) -> None:
    (tmp_path / "some_norms.py").write_text(NORMS)
    monkeypatch.syspath_prepend(tmp_path)
    compiled = importlib.import_module("some_norms").run()
    command = [sys.executable, "-m", "some_norms"]
    again = subprocess.run(
        command, check=True, timeout=120, capture_output=True, text=True, cwd=tmp_path
    )
    assert again.stdout.split() == [str(compiled), "1"]
