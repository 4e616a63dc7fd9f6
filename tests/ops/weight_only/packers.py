"""Packers of quantised weights in numpy, independent of the library."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

AWQ = (0, 4, 1, 5, 2, 6, 3, 7)


def signed(words: np.ndarray) -> Tensor:
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def along_rows(codes: np.ndarray, bits: int) -> Tensor:
    """GPTQ's weights [K, N]: a column is a stream of bits in words of 32."""
    rows, columns = codes.shape
    out = np.zeros((rows * bits // 32, columns), np.uint64)
    for k in range(rows):
        for bit in range(bits):
            word, place = divmod(k * bits + bit, 32)
            out[word] |= (
                (codes[k].astype(np.uint64) >> np.uint64(bit)) & np.uint64(1)
            ) << np.uint64(place)
    return signed(out)


def along_columns(codes: np.ndarray, bits: int) -> Tensor:
    """GPTQ zero points [G, N]."""
    return along_rows(codes.T, bits).T.contiguous()


def awq(codes: np.ndarray) -> Tensor:
    """AWQ weights [K, N] and zero points, 8 columns per word."""
    out = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for column in range(codes.shape[1]):
        nibble = AWQ[column % 8]
        out[:, column // 8] |= codes[:, column].astype(np.uint32) << np.uint32(4 * nibble)
    return signed(out)


def marlin(codes: np.ndarray, bits: int) -> Tensor:
    """Weights [K, N] in Marlin's layout: tiles of four 16 x 16 blocks, in each of which a thread of
    a warp has two pairs of rows in two columns."""
    fragment = []
    for thread in range(32):
        column = thread // 4
        first = 2 * (thread % 4)
        for half in (0, 1):
            for row in (first, first + 1, first + 8, first + 9):
                fragment.append(16 * row + column + 8 * half)
    order = [256 * block + place for thread in range(32) for block in range(4)
             for place in fragment[8 * thread : 8 * thread + 8]]  # fmt: skip
    inner = [0, 2, 4, 6, 1, 3, 5, 7] if bits == 4 else [0, 2, 1, 3]
    order = np.array(order).reshape(-1, len(inner))[:, inner].ravel()
    rows, columns = codes.shape
    blocks = codes.reshape(rows // 16, 16, columns // 16, 16).transpose(0, 2, 1, 3)
    tiles = blocks.reshape(-1, 1024)[:, order].reshape(rows // 16, -1).astype(np.uint32)
    out = np.zeros((tiles.shape[0], tiles.shape[1] * bits // 32), np.uint32)
    for i in range(32 // bits):
        out |= tiles[:, i :: 32 // bits] << np.uint32(bits * i)
    return signed(out)


def marlin_scales(scales: Tensor) -> Tensor:
    """Scales [G, N] in Marlin's layout."""
    if scales.shape[0] > 1:
        order = [i + 8 * j for i in range(8) for j in range(8)]
    else:
        order = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    return scales.reshape(-1, len(order))[:, order].reshape(scales.shape).contiguous()


def marlin_zeros(zeros: np.ndarray, bits: int) -> Tensor:
    """Zero points [G, N] in Marlin's layout."""
    order = [i + 8 * j for i in range(8) for j in range(8)]
    inner = [0, 2, 4, 6, 1, 3, 5, 7] if bits == 4 else [0, 2, 1, 3]
    moved = zeros.reshape(-1, 64)[:, order].reshape(-1, len(inner))[:, inner]
    return along_columns(moved.reshape(zeros.shape), bits)


def qserve(codes: np.ndarray) -> Tensor:
    """QServe's weights [N, K] of 4 bits, element by element."""
    rows, columns = codes.shape
    out = np.zeros((rows // 32, columns // 32, 8, 4, 2, 2, 4), np.uint8)
    for n in range(rows):
        n32, rest = divmod(n, 32)
        nibble, rest = divmod(rest, 16)
        n8half, n8 = divmod(rest, 8)
        for k in range(columns):
            k32, rest = divmod(k, 32)
            k16half, rest = divmod(rest, 16)
            k4, kin4 = divmod(rest, 4)
            out[n32, k32, n8, k4, k16half, n8half, kin4] |= codes[n, k] << 4 * nibble
    return torch.from_numpy(out.reshape(rows, columns // 2).view(np.int8))


def qserve_groups(values: np.ndarray) -> Tensor:
    """QServe's scales and zeros [K / 128, N] of int8."""
    out = np.zeros_like(values)
    for n in range(values.shape[1]):
        n32, rest = divmod(n, 32)
        j, i = divmod(rest, 8)
        out[:, 32 * n32 + 4 * i + j] = values[:, n]
    return torch.from_numpy(out)
