"""Records and index keys in 8 bits through the whole engine: the same invariances, coarser
values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cairn.cache.schema import BYTES
from cairn.errors import BadConfig
from tests.engine.dsa import FAMILIES, PAGE, made, prompts_of
from tests.engine.harness import engine, greedy, run
from tests.engine.test_kv_cache_dtype import assert_near
from tests.support import shows

OPTIONS = {"device": "cpu", "dtype": "float32", "kv_cache_dtype": "fp8_ds"}


@shows("deepseek_v32 glm_moe_dsa", "quantised KV")
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_batches_and_prefixes_agree(family: str, tmp_path: Path) -> None:
    prompts = prompts_of(5)[3:5]
    whole = run(made(tmp_path, family, **OPTIONS), prompts, greedy(6, prompt_logprobs=True))
    built = made(tmp_path, family, **OPTIONS)
    assert all(t.dtype == BYTES for layer in built.runner.pools.pages for t in layer.values())
    parts = run(built, prompts, greedy(6, prompt_logprobs=True), [7, PAGE, 90])
    for got, want in zip(parts, whole, strict=True):
        assert got.tokens == want.tokens
        assert_near(got.prompt_logprobs, want.prompt_logprobs)
        assert_near(got.logprobs, want.logprobs)
    again = run(built, prompts, greedy(6))
    for got, want in zip(again, whole, strict=True):
        assert got.cached >= PAGE
        assert_near(got.logprobs, want.logprobs)


def test_fp8_records_are_near_float32(tmp_path: Path) -> None:
    prompts = prompts_of(6)[3:5]
    small = run(made(tmp_path, "layers share", **OPTIONS), prompts, greedy(1, True))
    options = OPTIONS | {"kv_cache_dtype": "auto"}
    exact = run(made(tmp_path, "layers share", **options), prompts, greedy(1, True))
    for got, want in zip(small, exact, strict=True):
        told, found = want.prompt_logprobs, got.prompt_logprobs
        divergence = (np.exp(told) * (told - found)).sum(-1)
        # Random weights magnify the error of a few bits; a wrong value would have a far larger
        # effect.
        assert 0 < divergence.mean() < 0.2


def test_formats_of_other_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=r"fp8_e4m3, which is not a format of latent.*fp8_ds"):
        made(tmp_path, "layers share", **OPTIONS | {"kv_cache_dtype": "fp8_e4m3"})
    with pytest.raises(
        BadConfig, match=r"fp8_ds, a format of latent.*fp8_e4m3 or fp4_e2m1, or auto"
    ):
        engine("qwen_c64", kv_cache_dtype="fp8_ds")
