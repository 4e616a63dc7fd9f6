"""What a CPU engine compiles, it compiles before it is ready."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from cairn.ops import cpu

SCRIPT = """
import json, sys
from numba.core import event
from cairn import LLM, SamplingParams

compiled = []

class Watch(event.Listener):
    def on_start(self, happened):
        compiled.append(f"{happened.data['dispatcher'].py_func.__name__} {happened.data['args']}")
    def on_end(self, happened):
        pass

llm = LLM(dtype=sys.argv[1], max_num_seqs=4, max_model_len=4000, chunked_prefill_size=700)
held = Watch()
event.register("numba:compile", held)
params = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True, logprobs=2)
lengths = (1, 3, 40, 300, 3500)
llm.generate([{"prompt_token_ids": list(range(n % 200)) + [n % 50] * (n - n % 200)}
              for n in lengths], params, use_tqdm=False)
print(json.dumps(compiled))
"""


@pytest.mark.skipif(not cpu.AVAILABLE, reason="Numba is not installed")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_requests_compile_nothing(dtype):
    command = [sys.executable, "-c", SCRIPT, dtype]
    answer = subprocess.run(command, check=True, timeout=250, capture_output=True, text=True)
    assert json.loads(answer.stdout.splitlines()[-1]) == []
