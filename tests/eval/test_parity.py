import math

import pytest
import torch
from safetensors.torch import save_file

from cairn import LLM, SamplingParams
from cairn.config import default_model_path
from cairn.errors import BadRequest, CairnError
from cairn.eval import parity
from cairn.eval.parity import ParityPlan, compare
from tests.bench.fake_api import FakeApi
from tests.llm.conftest import DATA

OPTIONS = {"kv_cache_memory": "16MiB", "device": "cpu", "dtype": "float32"}
MODEL = default_model_path()
PLAN = ParityPlan(MODEL, OPTIONS, length=300, last=40, samples=1)


def test_numbers_of_a_comparison():
    p = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    q = torch.tensor([[0.25, 0.75], [0.9, 0.1]]).log() + 3.0
    found = compare(p, q)
    kl = 0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75)
    assert found["rows"] == 2
    assert found["kl_max"] == pytest.approx(kl, abs=1e-6)
    assert found["kl_mean"] == pytest.approx(kl / 2, abs=1e-6)
    # In the first row the likeliest token of p is the first of two equal ones.
    assert found["top1_agreement"] == 0.5
    assert found["logprob_error_max"] == pytest.approx(math.log(2), abs=1e-6)


def test_chunks_change_nothing_and_the_window_does():
    same = parity.against_options(PLAN, {"chunked_prefill_size": 37})
    assert same["rows"] == 40 and same["top1_agreement"] == 1.0
    assert same["logprob_error_max"] < 1e-3
    # Only slots beyond the window differ, and a prompt of 300 tokens reaches slightly beyond it.
    other = parity.against_options(
        ParityPlan(MODEL, OPTIONS, length=700, last=40, samples=1), {"attention_backend": "window"}
    )
    assert other["kl_mean"] > 100 * abs(same["kl_mean"]) + 1e-4
    with pytest.raises(BadRequest, match="nothing differs"):
        parity.against_options(PLAN, {})


def test_the_golden_logits():
    found = parity.against_file(PLAN, DATA / "goldens" / "cairn-7m" / "vectors.safetensors")
    assert found["rows"] == 160 and found["length"] == 2016
    assert found["top1_agreement"] == 1.0
    assert 0 <= found["kl_max"] < 1e-6
    assert found["logprob_error_max"] < 2e-3


def test_a_saved_reference_is_read_back(tmp_path):
    path = tmp_path / "new" / "x.safetensors"
    assert parity.save_reference(PLAN, path)["rows"] == 40
    found = parity.against_file(PLAN, path)
    assert (found["rows"], found["length"], found["logprob_error_max"]) == (40, 300, 0.0)


@pytest.mark.parametrize(
    "tensors, said",
    [
        ({"x": torch.zeros(2)}, "input_ids"),
        ({"input_ids": torch.arange(3), "logits": torch.zeros(4, 256)}, "4 rows of logits for 3"),
        ({"input_ids": torch.arange(3), "logits": torch.zeros(2, 99)}, "vocabulary has 256"),
    ],
)
def test_files_that_do_not_do(tmp_path, tensors, said):
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(BadRequest, match=said):
        parity.against_file(PLAN, tmp_path / "x.safetensors")
    with pytest.raises(BadRequest, match="cannot be read"):
        parity.against_file(PLAN, tmp_path / "none.safetensors")


class EchoApi(FakeApi):
    """Echoes prompts with the log-probabilities of an engine, each top one raised by `shift`."""

    llm = None
    shift = 0.0

    async def _answer(self, request, body):
        from aiohttp import web

        if self.llm is None:
            return await super()._answer(request, body)
        assert body["echo"] and body["max_tokens"] == 1
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=body["logprobs"])
        prompt = {"prompt_token_ids": body["prompt"]}
        [result] = self.llm.generate(prompt, params, use_tqdm=False)
        values, tops = [None], [None]
        for token, entry in zip(body["prompt"][1:], result.prompt_logprobs[1:], strict=True):
            best = max(entry, key=lambda i, entry=entry: entry[i].logprob)
            told = {i: e.logprob + self.shift * (i == best) for i, e in entry.items()}
            values.append(told[token])
            tops.append({_name(i): value for i, value in told.items()})
        # The generated token.
        values, tops = [*values, -0.5], [*tops, {"x": -0.5}]
        logprobs = {"token_logprobs": values, "top_logprobs": tops}
        return web.json_response({"choices": [{"text": "", "logprobs": logprobs}]})


def _name(token):
    return chr(token) if token < 128 else f"bytes:\\x{token:02x}"


@pytest.fixture
def echo():
    with EchoApi() as api:
        api.llm = LLM(MODEL, **OPTIONS)
        yield api


def test_a_server_that_echoes(echo):
    from cairn.bench.serve.client import ServerAddress

    found = parity.against_server(PLAN, ServerAddress(echo.url))
    assert found["rows"] == 40 and found["top1_agreement"] == 1.0
    assert abs(found["kl_mean"]) < 1e-5
    assert found["logprob_error_max"] < 1e-3
    echo.shift = -0.4
    other = parity.against_server(PLAN, ServerAddress(echo.url))
    assert other["logprob_error_max"] == pytest.approx(0.4, abs=1e-3)
    assert other["kl_mean"] > 0.01


def test_a_server_that_does_not():
    from cairn.bench.serve.client import ServerAddress

    with FakeApi() as api, pytest.raises(CairnError, match="does not tell the log-prob"):
        parity.against_server(PLAN, ServerAddress(api.url))
