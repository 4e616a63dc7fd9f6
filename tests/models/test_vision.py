"""The image encoder, and a whole model with it, compared with transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from cairn.config import EngineOptions
from cairn.engine.build import build
from cairn.engine.media.pixels import prepared_image, prepared_video
from cairn.engine.media.prompt import placed
from cairn.errors import BadModel
from cairn.models.registry import load_model, load_spec
from tests.engine.harness import Limits, difference, greedy, trace
from tests.seeing import END, IMAGE, START, VIDEO, config, media_spec, picture, write
from tests.support import shows

BOUND = 2e-4


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The reference model with random weights, and its folder."""
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForConditionalGeneration

    torch.manual_seed(3)
    given = Qwen3_5Config(**config())
    given._attn_implementation = given.vision_config._attn_implementation = "eager"
    model = Qwen3_5ForConditionalGeneration(given).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            spread = 0.3 if tensor.dim() > 1 else 0.1
            centre = 1.0 if "visual" in name and "norm" in name and "weight" in name else 0.0
            tensor.copy_(centre + spread * torch.randn_like(tensor))
    folder = tmp_path_factory.mktemp("seeing")
    model.save_pretrained(folder)
    (folder / "config.json").unlink()
    return model, write(folder)


def test_embeddings_are_the_references(reference) -> None:
    model, folder = reference
    own = load_model(folder, load_spec(folder), "float32", "cpu")
    media = media_spec()
    video = prepared_video([picture(seed) for seed in range(5)], media)
    for item in (*(prepared_image(picture(s, 20 + 30 * s, 70), media) for s in range(3)), video):
        pixels = torch.from_numpy(item.item.array().copy())
        with torch.inference_mode():
            found = own.encode(pixels)
            t, h, w = item.grid
            grid = torch.tensor([[t, 2 * h, 2 * w]])
            patches = own.encoder.patches(pixels)
            (wanted,) = model.model.get_image_features(patches, grid).pooler_output
        assert found.shape == (item.tokens, 32)
        assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()


@shows("qwen3_5", "reference logits", "chunked prefill", "images")
@pytest.mark.parametrize("chunk", [7, 4096])
def test_logits_are_the_references(reference, chunk: int) -> None:
    """Logits of a prompt with images and a video, and of the generated tokens."""
    model, folder = reference
    media = media_spec()
    images = [prepared_image(picture(7, 40, 24), media), prepared_image(picture(8), media)]
    video = prepared_video([picture(seed, 16, 24) for seed in range(3)], media, fps=2.0)
    ids = [1, START, IMAGE, END, 2, START, VIDEO, END, 5, 6, START, IMAGE, END, 9, 10]
    ids, own = placed(ids, [*images, video], media, lambda text: list(text.encode()))
    built = build(
        folder, EngineOptions(dtype="float32", device="cpu", kv_cache_memory="4MiB", max_num_seqs=2)
    )
    built.core.scheduler.limits = Limits(2, chunk)
    live = built.core.add("r", ids, greedy(6, prompt_logprobs=True), media=own)
    while built.core.has_work:
        built.core.step()
    got = trace(live, built.spec.vocab_size)
    everything = torch.tensor([[*ids, *got.tokens[:-1]]])
    types = torch.tensor([[{IMAGE: 1, VIDEO: 2}.get(t, 0) for t in everything[0].tolist()]])
    patches = [
        built.runner.model.encoder.patches(torch.from_numpy(i.array().copy())) for i in own.items
    ]
    grids = [[t, 2 * h, 2 * w] for t, h, w in (p.grid for p in (images[0], video, images[1]))]
    with torch.inference_mode():
        wanted = model(
            input_ids=everything,
            mm_token_type_ids=types,
            pixel_values=torch.cat((patches[0], patches[2])),
            image_grid_thw=torch.tensor([grids[0], grids[2]]),
            pixel_values_videos=patches[1],
            video_grid_thw=torch.tensor([grids[1]]),
        ).logits[0]
    scale = float(wanted.abs().max())
    wanted = torch.log_softmax(wanted.double(), -1).numpy()
    assert difference(got.prompt_logprobs, wanted[: len(ids) - 1]) < BOUND * scale
    assert difference(got.logprobs, wanted[len(ids) - 1 :]) < BOUND * scale


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"deepstack_visual_indexes": [1]}, "deepstack"),
        ({"num_heads": 3}, "num_heads"),
        ({"num_position_embeddings": 26}, "not a square"),
        ({"out_hidden_size": 64}, "out_hidden_size is 64"),
        ({"hidden_act": "silu"}, "hidden_act"),
        ({"in_channels": 1}, "in_channels"),
    ],
)
def test_impossible_encoders(change: dict, words: str) -> None:
    given = config()
    given["vision_config"] |= change
    with pytest.raises(BadModel, match=words):
        load_spec(given)


def test_preprocessor_files(tmp_path: Path) -> None:
    folder = write(tmp_path)
    media = load_spec(folder).vision.media
    assert (media.images.least, media.images.most) == (256, 4096)
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps({"min_pixels": 64, "max_pixels": 128, "image_mean": [0, 0, 0]}))
    media = load_spec(folder).vision.media
    assert (media.images.least, media.images.most, media.mean) == (64, 128, (0.0, 0.0, 0.0))
    path.write_text(json.dumps({"patch_size": 14}))
    with pytest.raises(BadModel, match="patch_size is 14"):
        load_spec(folder)
    path.write_text(json.dumps({"min_pixels": 8, "max_pixels": 4}))
    with pytest.raises(BadModel, match="sizes from 8 to 4"):
        load_spec(folder)
