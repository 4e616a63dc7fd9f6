"""Options of landmark attention through the whole engine, compared with the formulas."""

from __future__ import annotations

import numpy as np
import pytest

from cairn.errors import BadConfig
from tests.engine.harness import FEW_CASES, ROUNDING, difference, engine, greedy, run, text
from tests.failures.models import folder, rows, wide
from tests.failures.oracle import oracle
from tests.specs import hils_of

LENGTH = 200


def prefill_rows(built, tokens):
    return rows(run(built, [tokens], greedy(1, prompt_logprobs=True))[0])


@pytest.mark.parametrize("case", FEW_CASES)
def test_the_oracle_agrees_on_every_golden_model(case):
    built, tokens = engine(case), text(30, 130)
    want, _ = oracle(built, tokens)
    assert difference(prefill_rows(built, tokens), want) < ROUNDING


@pytest.mark.parametrize(
    "case, strategy",
    [
        ("qwen_noprior_lmk_k", "group"),
        ("qwen_gqa4_prior_lora_inrange", "head"),
        ("qwen_gqa4_prior_lora_inrange", "softmax_head"),
        pytest.param("qwen_meanpool_nolmk", "group", marks=pytest.mark.slow),
        pytest.param("olmo_mha_interleave4", "head", marks=pytest.mark.slow),
    ],
)
def test_selection_strategies(case, strategy):
    """The older strategies score by the landmark's own key, whatever summaries the model has."""
    built, tokens = engine(case, hsa_selection_strategy=strategy), text(31, LENGTH)
    (warning,) = built.config.warnings
    assert f"hsa_selection_strategy={strategy} contradicts" in warning
    want, _ = oracle(built, tokens)
    # Summed queries have larger scores, and so larger float32 rounding: the goldens use the same
    # bound.
    noise = ROUNDING * np.abs(want).max()
    assert difference(prefill_rows(built, tokens), want) < noise
    chunked = run(built, [tokens], greedy(3), budgets=[37])[0]
    assert difference(chunked.logprobs[:1], want[-1:]) < noise


def test_selection_strategies_differ(tmp_path):
    at, tokens = folder(tmp_path / "m"), text(32, LENGTH)
    found = [
        prefill_rows(wide(at, hsa_selection_strategy=s), tokens)
        for s in ("auto", "group", "head", "softmax_head")
    ]
    for i, one in enumerate(found):
        for other in found[:i]:
            assert difference(one, other) > 0.1


def test_auto_is_the_models_own_rule_and_warns_of_nothing():
    built = engine("qwen_gqa4_prior_lora_inrange")
    assert hils_of(built.spec).strategy == "hils"
    assert built.config.warnings == ()


@pytest.mark.parametrize("topk", [1, 7, 50])
def test_topk(tmp_path, topk):
    built, tokens = wide(folder(tmp_path / "m"), hsa_topk=topk), text(33, LENGTH)
    assert built.config.warnings == (f"hsa_topk={topk} contradicts the trained model (4)",)
    want, _ = oracle(built, tokens, topk=topk)
    assert difference(prefill_rows(built, tokens), want) < ROUNDING


@pytest.mark.parametrize("window", [1, 17, 100])
def test_window_size(tmp_path, window):
    built, tokens = wide(folder(tmp_path / "m"), hsa_window_size=window), text(34, LENGTH)
    assert f"hsa_window_size={window} contradicts" in built.config.warnings[0]
    want, _ = oracle(built, tokens, window=window)
    assert difference(prefill_rows(built, tokens), want) < ROUNDING


@pytest.mark.parametrize(("given", "layers"), [("1", (1,)), ("0", (0,)), ([1], (1,)), ([], ())])
def test_a_subset_of_the_landmark_layers(tmp_path, given, layers):
    """The other landmark layers read only their window, with unchanged alignment."""
    built, tokens = wide(folder(tmp_path / "m"), hsa_layers=given), text(35, LENGTH)
    assert "contradicts the trained model (0-1)" in built.config.warnings[0]
    want, _ = oracle(built, tokens, landmark_layers=layers)
    assert difference(prefill_rows(built, tokens), want) < ROUNDING


def test_all_landmark_layers_named_is_no_contradiction(tmp_path):
    assert wide(folder(tmp_path / "m"), hsa_layers="0-1").config.warnings == ()


def test_layers_without_landmarks_are_refused():
    with pytest.raises(BadConfig, match=r"hsa_layers names \[0\].*3,7"):
        engine("olmo_mha_interleave4", hsa_layers="0,3")


@pytest.mark.parametrize("case", ["qwen_gqa4_prior_lora_inrange", "olmo_mha_interleave4"])
def test_dense_attention_over_a_landmark_model(case):
    built, tokens = engine(case, attention_backend="dense"), text(36, LENGTH)
    assert "attention_backend=dense contradicts the trained model (hsa)" in built.config.warnings[0]
    want, _ = oracle(built, tokens, dense=True)
    assert difference(prefill_rows(built, tokens), want) < ROUNDING


@pytest.mark.parametrize("case", ["qwen_gqa4_prior_lora_inrange", "olmo_mha_interleave4"])
def test_window_attention_over_a_landmark_model(case):
    built, tokens = engine(case, attention_backend="window"), text(37, LENGTH)
    assert "attention_backend=window contradicts" in built.config.warnings[0]
    want, _ = oracle(built, tokens, landmark_layers=())
    assert difference(prefill_rows(built, tokens), want) < ROUNDING


def test_landmark_id():
    case = "qwen_noprior_lmk_k"
    for same in (-1, 287):
        assert engine(case, hsa_lmk_id=same).config.warnings == ()
    with pytest.raises(BadConfig, match="hsa_lmk_id is 5.*287.*--hsa-lmk-id 287 or -1"):
        engine(case, hsa_lmk_id=5)
