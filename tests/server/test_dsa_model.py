"""A model with sparse latent attention and experts, random weights, with `cairn serve`."""

from __future__ import annotations

import asyncio
import random
import shutil

import openai
import pytest

from cairn.bench.shapes import config_of
from cairn.llm import default_model_path
from tests.engine.dsa import store
from tests.server.running import Stream, running
from tests.server.test_bad_days import check_healthy

SMALL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 8192,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
"""dsa-lite with other widths."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dsa-lite")
    store(folder, config_of("dsa-lite", "dsa") | SMALL)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(default_model_path() / name, folder)
    options = ("--device", "cpu", "--kv-cache-dtype", "fp8_ds", "--max-num-seqs", "8")
    with running(tmp_path_factory.mktemp("server"), str(folder), *options) as started:
        yield started


@pytest.mark.slow
def test_the_openai_client_reads_answers_and_streams(server):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    (model,) = client.models.list()
    prompt = "".join(random.Random(1).choice("abcdefgh ") for _ in range(200))
    given = {"model": model.id, "prompt": prompt, "max_tokens": 4, "temperature": 0}
    whole = client.completions.create(**given, extra_body={"ignore_eos": True})
    assert whole.usage.prompt_tokens > 100 and whole.usage.completion_tokens == 4
    pieces = client.completions.create(**given, stream=True, extra_body={"ignore_eos": True})
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text


@pytest.mark.slow
def test_aborted_streams_leave_an_exact_ledger(server):
    engine, rng = server.engine.pid, random.Random(2)
    asyncio.run(visitors(server.url, [rng.random() for _ in range(8)]))
    check_healthy(server, engine)


async def visitors(url, moments):
    """Streams over long prompts, half of which are closed at a given moment."""

    async def one(number, seconds):
        prompt = f"{number} " + "x" * (60 * number)
        stream = Stream(url, prompt=prompt, max_tokens=6, ignore_eos=True)
        await stream.open()
        if number % 2:
            await asyncio.sleep(seconds)
            stream.break_off()
        else:
            await asyncio.wait_for(stream.finish(), 120)
            assert stream.status == 200 and "[DONE]" in stream.text

    await asyncio.gather(*(one(number, seconds) for number, seconds in enumerate(moments)))
