from array import array

import pytest
import torch

from cairn import LLM, SamplingParams
from cairn.cache.invariants import check
from cairn.config import default_model_path
from cairn.errors import BadRequest, TooLong
from cairn.eval.logits import read_tail, tail_logits
from cairn.eval.ppl import tail_nats

TEXT = "def path(name):\n    return name\n" * 12


@pytest.fixture(scope="module")
def llm():
    llm = LLM(
        default_model_path(),
        dtype="float32",
        device="cpu",
        kv_cache_memory="4MiB",
        chunked_prefill_size=100,
    )
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def reported(llm):
    """Log-probabilities [n - 1, V] of the prompt's tokens, as the engine reports them."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1)
    [result] = llm.generate(TEXT, params, use_tqdm=False)
    rows = []
    for entry in result.prompt_logprobs[1:]:
        ids, values, _ = entry.columns
        row = torch.empty(256)
        row[torch.as_tensor(ids)] = torch.as_tensor(values)
        rows.append(row)
    return torch.stack(rows)


# Ends within a chunk, on a page's last token, on a chunk's last token; all rows.
@pytest.mark.parametrize("length, rows", [(384, 50), (315, 64), (300, 1), (127, 127), (64, 3)])
def test_the_logits_are_those_that_the_engine_reports(llm, reported, length, rows):
    ids = list(TEXT.encode())[:length]
    found = tail_logits(llm, ids, rows).log_softmax(-1)
    want = reported[length - rows : length] if length < len(TEXT) else reported[-rows + 1 :]
    found = found[: len(want)]
    assert found.shape == want.shape
    assert (found - want).abs().max() < 2e-4


def test_blocks_come_in_order_and_pages_come_back(llm, monkeypatch):
    monkeypatch.setattr("cairn.runner.logprobs.BLOCK_BYTES", 4 * 256 * 7)
    core = llm.engine.core
    ids, seen, steps = list(TEXT.encode()), [], []
    read_tail(llm, ids, 30, lambda at, logits: seen.append((at, len(logits))), steps.append)
    assert sum(n for _, n in seen) == 30 and len(seen) >= 5
    assert [at for at, _ in seen] == [sum(n for _, n in seen[:i]) for i in range(len(seen))]
    assert sum(steps) == len(ids) and len(steps) == 4
    report = check(core.cache, [])
    assert report.owned == 0
    # The engine works as before.
    again = llm.generate("x = 1\n", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    assert len(again[0].outputs[0].token_ids) == 4


def test_nats_of_the_last_tokens(llm, reported):
    ids = array("q", list(TEXT.encode()))
    want = -sum(float(reported[i - 1, ids[i]]) for i in range(len(ids) - 20, len(ids)))
    assert tail_nats(llm, ids, 20) == pytest.approx(want, abs=1e-3)
    assert tail_nats(llm, ids, 300) > want + 10


@pytest.mark.parametrize(
    "count, rows, error, said",
    [(5, 6, BadRequest, "6 rows of a prompt of 5"), (10**6, 1, TooLong, "max_model_len")],
)
def test_impossible_sizes_are_refused(llm, count, rows, error, said):
    with pytest.raises(error, match=said):
        tail_logits(llm, [1] * count, rows)
