"""Two small models with the public LLM class, created once."""

from __future__ import annotations

from pathlib import Path

import pytest

from cairn import LLM
from cairn.cache.invariants import check
from cairn.config import default_model_path

DATA = Path(__file__).parent.parent / "data"


@pytest.fixture(scope="session")
def text_folder() -> Path:
    """A byte-level model with a tokenizer: a token id is a byte."""
    return default_model_path()


@pytest.fixture(scope="session")
def token_folder() -> Path:
    """A model without tokenizer, with pages of 16 slots, 256 ids, end of sequence 1."""
    return DATA / "goldens" / "hils" / "qwen_gqa4_prior_lora_inrange"


@pytest.fixture(scope="session")
def shared_llm(text_folder) -> LLM:
    return LLM(text_folder, dtype="float32", device="cpu", kv_cache_memory="32MiB")


@pytest.fixture(scope="session")
def shared_token_llm(token_folder) -> LLM:
    return LLM(token_folder, device="cpu", kv_cache_memory="4MiB", max_num_seqs=8)


@pytest.fixture
def llm(shared_llm) -> LLM:
    """The text model; no request may be left after the test."""
    yield shared_llm
    assert_idle(shared_llm)


@pytest.fixture
def token_llm(shared_token_llm) -> LLM:
    """The token model; no request may be left after the test."""
    yield shared_token_llm
    assert_idle(shared_token_llm)


def assert_idle(llm: LLM) -> None:
    """No request is left, and every page is either free or cached."""
    core = llm.engine.core
    assert not core.has_work
    assert not core.scheduler.running
    report = check(core.cache, [])
    assert report.owned == 0
    assert report.free + report.evictable == report.num_pages
