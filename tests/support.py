"""Registers which tests show that a feature works with a model family.

`docs/support.md` is generated from these marks. One line above a test adds a cell:

    @shows("qwen3 qwen3_moe", "prefix cache", "chunked prefill")
    def test_...

Arguments are literals, because the generator reads them without importing the test. A test that is
marked `gpu` shows the feature on a GPU. Run `make docs` afterwards.
"""

from __future__ import annotations

import pytest

FAMILIES = {
    "hils": "`qwen_hils`, `olmo_hils`",
    "llama": "`llama`",
    "mistral": "`mistral`",
    "qwen2": "`qwen2`",
    "qwen3": "`qwen3`",
    "gemma3": "`gemma3`, `gemma3_text`",
    "qwen3_moe": "`qwen3_moe`",
    "qwen3_next": "`qwen3_next`",
    "qwen3_5": "`qwen3_5`",
    "qwen3_5_moe": "`qwen3_5_moe`",
    "deepseek_v32": "`deepseek_v32`",
    "glm_moe_dsa": "`glm_moe_dsa`",
    "deepseek_v4": "`deepseek_v4`",
}
"""Family -> model types of its config.json; the rows of the table."""

FEATURES = {
    "reference logits": "logits equal those of the family's reference implementation",
    "batching": "a request gives the same logits in a batch as alone",
    "chunked prefill": "a prompt gives the same logits in chunks of any size as in one step",
    "prefix cache": "a prompt gives the same logits with a cached prefix as without",
    "sliding window": "layers with a window, whose logits are the reference's",
    "quantised KV": "pages in 8 bits (`--kv-cache-dtype fp8_e4m3` or `fp8_ds`) or 4 (`fp4_e2m1`)",
    "quantised weights": "weights in 4 or 8 bits with scales, as the checkpoint stores them",
    "overlap": "the next step is planned while one runs, with the same tokens",
    "CUDA graph": "steps run as CUDA graphs, with the same tokens as without",
    "speculation": "drafted tokens are verified, with the same tokens as without",
    "images": "prompts with images and videos give the reference's logits",
    "TP": "a model divided between two ranks (`--tensor-parallel-size`) gives what it gives whole",
    "EP": "ranks that hold some experts each (`--enable-expert-parallel`) give what one gives",
    "PD": "prefill and decode in different processes",
    "host prefix cache": "a prefix that the device gave up comes back from host memory bit for bit",
    "host tier": "pages live in host memory (`--kv-host-tier`); selected ones come into frames",
}
"""Feature -> what its tests show; the columns of the table."""


def shows(families: str, *features: str) -> pytest.MarkDecorator:
    """Decorator: the test shows features with families.

    Args:
        families: keys of FAMILIES, separated by spaces.
        features: keys of FEATURES.
    """
    unknown = [f for f in families.split() if f not in FAMILIES]
    unknown += [f for f in features if f not in FEATURES]
    if unknown or not families.split() or not features:
        raise ValueError(f"shows() names {unknown}; known are FAMILIES and FEATURES of this file")
    return pytest.mark.shows(families, *features)
