"""A vision transformer with learned and rotary positions, and the merger after it.

Source: the vision model of Qwen3-VL and Qwen3.5 in transformers. One image or video runs at a time,
so its results do not depend on other requests.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from cairn.layers.linear import Linear
from cairn.layers.norm import LayerNorm
from cairn.layers.schemes.base import Rows
from cairn.layers.weight import Source, Weight
from cairn.models.vision.positions import grid_positions, interpolation, rotary_table
from cairn.specs.vision import VisionSpec

ROWS_AT_ONCE = 16384
"""Patches whose feed-forward layer runs at once: its intermediate activations of a large image
would dominate memory use."""


class VisionEncoder(nn.Module):
    """Patches -> embeddings.

    Args:
        spec: of the encoder.
        dtype: of activations and parameters.
    """

    def __init__(self, spec: VisionSpec, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec, self.dtype = spec, dtype
        width, merged = spec.width, spec.width * spec.media.merge**2
        self.patch = Linear(spec.patch_numbers, [Rows("proj", width)], True, dtype=dtype)
        table = torch.empty(spec.side**2, width, dtype=dtype)
        self.positions = nn.Parameter(table, requires_grad=False)
        self.blocks = nn.ModuleList(VisionBlock(spec, dtype) for _ in range(spec.depth))
        self.norm = LayerNorm(width, spec.eps, dtype=dtype)
        self.inner = Linear(merged, [Rows("linear_fc1", merged)], True, dtype=dtype)
        self.out = Linear(merged, [Rows("linear_fc2", spec.out)], True, dtype=dtype)

    def weights(self, source: Source) -> list[Weight]:
        """Patch embedding, positions, blocks, merger."""
        spec, media = self.spec, self.spec.media
        name = source.name("patch_embed.proj.weight")
        shape = (spec.width, 3, media.frames, media.patch, media.patch)
        patch = [w for w in self.patch.weights(source.within("patch_embed")) if w.source != name]
        merger, blocks = source.within("merger"), source.within("blocks")
        found = [
            Weight(name, shape, self.patch.weight, transform=_flat),
            *patch,
            Weight(source.name("pos_embed.weight"), tuple(self.positions.shape), self.positions),
            *self.norm.weights(merger, "norm"),
            *self.inner.weights(merger),
            *self.out.weights(merger),
        ]
        for i, block in enumerate(self.blocks):
            found += cast(VisionBlock, block).weights(blocks.within(str(i)))
        return found

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.positions.device

    def patches(self, pixels: Tensor) -> Tensor:
        """Frames [f, h, w, 3] uint8 -> patches [N, channels * frames * patch * patch] float32.

        Sides are multiples of patch * merge. An image is repeated to fill its patches' frames, a
        video padded with its last frame. Patches are ordered by frames, then by squares of merge *
        merge, row by row, then by row and column in a square.
        """
        media = self.spec.media
        p, m, t = media.patch, media.merge, media.frames
        # As the reference: scaled in float64, then rounded to float32.
        x = (pixels.double() * (1 / 255)).float()
        mean, std = (x.new_tensor(numbers) for numbers in (media.mean, media.std))
        x = (x - mean) / std
        missing = -len(x) % t
        if missing:
            x = torch.cat((x, x[-1:].expand(missing, -1, -1, -1)))
        f, h, w, _ = x.shape
        x = x.view(f // t, t, h // (p * m), m, p, w // (p * m), m, p, 3)
        return x.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(-1, self.spec.patch_numbers)

    def forward(self, pixels: Tensor) -> Tensor:
        """Frames [f, h, w, 3] uint8 -> embeddings [n, out], those of each group of frames row by
        row."""
        media = self.spec.media
        frames = -(-pixels.shape[0] // media.frames)
        grid = pixels.shape[1] // media.patch, pixels.shape[2] // media.patch
        place = grid_positions(*grid, media.merge).to(self.device)
        x = self.patch(self.patches(pixels.to(self.device)).to(self.dtype))
        index, weight = interpolation(place, grid, self.spec.side)
        learned = (self.positions[index].float() * weight[..., None]).sum(1)
        x = (x.view(frames, -1, self.spec.width) + learned.to(self.dtype)).flatten(0, 1)
        cos, sin = rotary_table(place, self.spec.head_dim, self.spec.theta)
        for block in self.blocks:
            x = block(x, frames, cos, sin)
        merged = self.norm(x).view(-1, self.spec.width * media.merge**2)
        found: Tensor = self.out(functional.gelu(self.inner(merged)))
        return found


class VisionBlock(nn.Module):
    """x += proj(attention(norm1 x)); x += fc2(gelu_tanh(fc1(norm2 x))).

    Args:
        spec: of the encoder.
        dtype: of activations and parameters.
    """

    def __init__(self, spec: VisionSpec, dtype: torch.dtype) -> None:
        super().__init__()
        width, inner = spec.width, spec.inner
        self.heads = spec.heads
        self.norm1, self.norm2 = (LayerNorm(width, spec.eps, dtype=dtype) for _ in range(2))
        self.qkv = Linear(width, [Rows("qkv", 3 * width)], True, dtype=dtype)
        self.proj = Linear(width, [Rows("proj", width)], True, dtype=dtype)
        self.fc1 = Linear(width, [Rows("linear_fc1", inner)], True, dtype=dtype)
        self.fc2 = Linear(inner, [Rows("linear_fc2", width)], True, dtype=dtype)

    def weights(self, source: Source) -> list[Weight]:
        """Norms, attention, feed-forward part."""
        attention, mlp = source.within("attn"), source.within("mlp")
        return [
            *self.norm1.weights(source, "norm1"),
            *self.norm2.weights(source, "norm2"),
            *self.qkv.weights(attention),
            *self.proj.weights(attention),
            *self.fc1.weights(mlp),
            *self.fc2.weights(mlp),
        ]

    def forward(self, x: Tensor, frames: int, cos: Tensor, sin: Tensor) -> Tensor:
        """x [frames * n, D] -> the same; cos, sin: of the n patches of a frame."""
        heads = self.qkv(self.norm1(x)).view(frames, -1, 3, self.heads, x.shape[1] // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            _rotated(q, cos, sin), _rotated(k, cos, sin), v
        )
        x = x + self.proj(mixed.transpose(1, 2).flatten(0, 1).flatten(1))
        # The MLP works row by row, so splitting the rows changes no result and bounds its memory.
        fed = [self._fed(part) for part in self.norm2(x).split(ROWS_AT_ONCE)]
        return x + (fed[0] if len(fed) == 1 else torch.cat(fed))

    def _fed(self, x: Tensor) -> Tensor:
        found: Tensor = self.fc2(functional.gelu(self.fc1(x), approximate="tanh"))
        return found


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., n, e] by angles [n, e / 2]: dimension i goes with i + e / 2."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


def _flat(weight: Tensor) -> Tensor:
    """The patch embedding as a matrix."""
    return weight.flatten(1)
