"""Placeholders and positions in prompts with images."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cairn.engine.media.pixels import prepared_image, prepared_video
from cairn.engine.media.prompt import placed
from cairn.errors import BadRequest
from cairn.runner.media import Placed
from tests.seeing import END, IMAGE, START, VIDEO, config, media_spec, picture

MEDIA = media_spec()


def encode(text: str) -> list[int]:
    return list(text.encode())


def images(*sizes: tuple[int, int]):
    return [prepared_image(picture(i, *size), MEDIA) for i, size in enumerate(sizes)]


def test_one_placeholder_becomes_as_many_as_there_are_embeddings() -> None:
    first, second = images((64, 64), (64, 128))
    ids = [1, START, IMAGE, END, 2, START, IMAGE, END, 3]
    found, media = placed(ids, [first, second], MEDIA, encode)
    spans = [(s.first, s.tokens, s.item) for s in media.spans]
    assert spans == [(2, first.tokens, 0), (first.tokens + 5, second.tokens, 1)]
    assert found.count(IMAGE) == first.tokens + second.tokens
    assert [n for n in found if n != IMAGE] == [n for n in ids if n != IMAGE]
    # A prompt with all placeholders stays unchanged.
    again, same = placed(found, [first, second], MEDIA, None)
    assert again == found and same.spans == media.spans


def test_a_video_becomes_times_and_groups_of_frames() -> None:
    video = prepared_video([picture(seed) for seed in range(5)], MEDIA, fps=2.0)
    ids = [1, START, VIDEO, END, 2]
    found, media = placed(ids, [video], MEDIA, encode)
    groups, h, w = video.grid
    wanted = [1]
    for seconds in video.seconds:
        wanted += [*encode(f"<{seconds:.1f} seconds>"), START, *[VIDEO] * (h * w), END]
    assert found == [*wanted, 2]
    assert [(s.grid, s.offset, s.item) for s in media.spans] == [
        ((1, h, w), i * h * w, 0) for i in range(groups)
    ]
    again, same = placed(found, [video], MEDIA, None)
    assert again == found and same.spans == media.spans
    with pytest.raises(BadRequest, match="no tokenizer"):
        placed(ids, [video], MEDIA, None)


@pytest.mark.parametrize("ids", [[1, 2], [IMAGE, 1, IMAGE], [1, VIDEO]])
def test_placeholders_and_images_must_be_as_many(ids: list[int]) -> None:
    with pytest.raises(BadRequest, match="placeholders of"):
        placed(ids, images((64, 64)), MEDIA, encode)


def test_positions_are_the_references() -> None:
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model

    video = prepared_video([picture(seed) for seed in range(5)], MEDIA, fps=2.0)
    pictures = images((64, 64), (64, 128), (128, 32))
    ids = [1, START, IMAGE, END, 2, IMAGE, IMAGE, 7, START, VIDEO, END, 8, 9]
    found, media = placed(ids, [pictures[0], pictures[1], video, pictures[2]], MEDIA, encode)
    with torch.device("meta"):
        model = Qwen3_5Model(Qwen3_5Config(**config()))
    types = [{IMAGE: 1, VIDEO: 2}.get(token, 0) for token in found]
    # The reference cannot separate adjacent images, so put a text token between them.
    at = media.spans[2].first
    found.insert(at, 5)
    types.insert(at, 0)
    spans = tuple(s._replace(first=s.first + (s.first >= at)) for s in media.spans)
    placing = Placed(type(media)(media.items, spans), 3)
    grids = [[1, 2 * h, 2 * w] for _, h, w in (p.grid for p in pictures)]
    t, h, w = video.grid
    wanted, delta = model.get_rope_index(
        torch.tensor([found]),
        torch.tensor([types]),
        torch.tensor(grids),
        torch.tensor([[t, 2 * h, 2 * w]]),
    )
    assert np.array_equal(placing.positions(0, len(found)), wanted[:, 0].numpy())
    assert placing.delta == int(delta[0, 0])
    # Any part of it, and the tokens generated after it.
    for begin, end in (
        (0, 3),
        (2, 9),
        (len(found) - 2, len(found) + 4),
        (len(found), len(found) + 9),
    ):
        own = placing.positions(begin, end)
        assert own.shape[1] == end - begin
        inside = min(end, len(found)) - begin
        if inside > 0:
            part = np.broadcast_to(own, (3, end - begin))[:, :inside]
            assert np.array_equal(part, wanted[:, 0, begin : begin + inside].numpy())
        if end > len(found):
            assert own[0, -1] == end - 1 + placing.delta
