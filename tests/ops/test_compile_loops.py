"""A CPU engine has compiled or loaded all loops before it is ready."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from cairn.ops import compile_loops, cpu
from cairn.ops.attention import loops
from cairn.ops.cpu import amx, avx512

SCRIPT = """
import json, sys
from cairn import LLM, SamplingParams

def held():
    # By function, for how many kinds of arguments: from the machine's cache or compiled now.
    modules = [m for name, m in sys.modules.items() if name.startswith("cairn.ops.")]
    return {
        f"{m.__name__}.{name}": len(value.signatures)
        for m in modules if m.__name__.endswith("loops")
        for name, value in vars(m).items()
        if getattr(value, "nopython_signatures", None) is not None
        and value.py_func.__module__ == m.__name__
        and value.targetoptions.get("nogil")
    }

llm = LLM(dtype=sys.argv[1], max_num_seqs=4, max_model_len=2000, chunked_prefill_size=700)
before = held()
params = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True, logprobs=2)
# The last prompt has more pages than are selected.
lengths = (1, 3, 40, 300, 1700)
llm.generate([{"prompt_token_ids": list(range(n % 200)) + [n % 50] * (n - n % 200)}
              for n in lengths], params, use_tqdm=False)
print(json.dumps([before, held()]))
"""


@pytest.mark.skipif(not cpu.AVAILABLE, reason="Numba is not installed")
@pytest.mark.parametrize(
    ("dtype", "threads"),
    [
        ("float32", 1),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("bfloat16", 1), ("float32", 2))),
    ],
)
def test_requests_find_all_loops_ready(dtype, threads):
    command = [sys.executable, "-c", SCRIPT, dtype]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    answer = subprocess.run(
        command, check=True, timeout=250, capture_output=True, text=True, env=environment
    )
    before, after = json.loads(answer.stdout.splitlines()[-1])
    assert len(before) >= 12
    bfloat16 = dtype == "bfloat16"
    only = {"tile_loops": bfloat16 and amx.AVAILABLE, "lanes": bfloat16 and avx512.PAIRS}
    for name, count in before.items():
        assert count or any(part in name and not able for part, able in only.items()), name
    assert after == before


@pytest.mark.skipif(not cpu.AVAILABLE, reason="Numba is not installed")
def test_a_loop_for_other_loops_refuses_a_call_from_python():
    with pytest.raises(TypeError, match="add_values is called by other loops"):
        loops.add_values(1, 2)


@pytest.mark.skipif(not cpu.AVAILABLE, reason="Numba is not installed")
def test_only_what_is_compiled_is_said_to_be(monkeypatch, tmp_path, caplog):
    """Loading cached loops may take long on a busy machine."""
    monkeypatch.setattr(compile_loops, "WARN_SECONDS", -1.0)
    monkeypatch.setattr(cpu, "mark_of", lambda *_: tmp_path / "mark")
    for part in ("_run_rows", "_run_windows", "_run_landmarks"):
        monkeypatch.setattr(compile_loops, part, lambda *_: None)
    for expected in (1, 0):
        caplog.clear()
        compile_loops.compile_loops.__wrapped__(torch.float32, helped=False)
        assert len(caplog.records) == expected
