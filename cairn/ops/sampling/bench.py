"""Benchmark points of this family's ops, for `cairn bench ops`."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops.bench_points import Alternative, Draw, Point, Points, flashinfer, moved
from cairn.ops.sampling.apply_logit_bias import apply_logit_bias
from cairn.ops.sampling.apply_penalties import apply_penalties
from cairn.ops.sampling.argmax_tokens import argmax_tokens
from cairn.ops.sampling.counter_uniform import counter_uniform
from cairn.ops.sampling.draw_from_probs import draw_from_probs
from cairn.ops.sampling.draw_tokens import draw_tokens
from cairn.ops.sampling.min_p_renorm_probs import min_p_renorm_probs
from cairn.ops.sampling.score_tokens import score_tokens
from cairn.ops.sampling.top_k_mask_logits import top_k_mask
from cairn.ops.sampling.top_k_renorm_probs import top_k_renorm
from cairn.ops.sampling.top_k_top_p_sampling_from_logits import draw_from_logits
from cairn.ops.sampling.top_p_renorm_probs import top_p_renorm
from cairn.ops.testing import Arguments


@apply_logit_bias.bench
def _(draw: Draw) -> Points:
    for rows, vocabulary in draw.logits():
        logits, bias = draw.randn(rows, vocabulary, dtype=torch.float32), draw.rand(4 * rows)
        tokens = draw.randint(0, vocabulary, 4 * rows)
        index = torch.stack((torch.arange(4 * rows, device=tokens.device) // 4, tokens), dim=1)
        yield Point(
            f"{4 * rows} of {rows} x {vocabulary}",
            draw.args(logits, index, bias),
            moved(index, bias, bias, bias),
            definition=True,
        )


@apply_penalties.bench
def _(draw: Draw) -> Points:
    for rows, vocabulary in draw.logits():
        logits = draw.randn(rows, vocabulary, dtype=torch.float32)
        mask = draw.rand(rows, vocabulary) < 0.01
        counts = draw.randint(0, 2, rows, vocabulary, dtype=torch.int32)
        penalties = [draw.rand(rows) + 0.5 for _ in range(3)]
        yield Point(
            f"{rows} x {vocabulary}",
            draw.args(logits, mask, counts, *penalties),
            moved(logits, logits, mask, counts),
            definition=True,
        )


@argmax_tokens.bench
def _(draw: Draw) -> Points:
    for rows, vocabulary in draw.logits():
        logits = draw.randn(rows, vocabulary, dtype=torch.float32)
        others = (Alternative("argmax", lambda logits: logits.argmax(dim=-1)),)
        yield Point(
            f"{rows} x {vocabulary}",
            draw.args(logits),
            moved(logits),
            alternatives=others,
            definition=True,
        )


@counter_uniform.bench
def _(draw: Draw) -> Points:
    for rows, _ in draw.logits():
        seed, index = draw.randint(0, 1 << 62, rows), draw.randint(0, 1 << 40, rows)
        yield Point(
            str(rows), draw.args(seed, index), moved(seed, index) + 4 * rows, definition=True
        )


@draw_from_probs.bench
def _(draw: Draw) -> Points:
    for rows, vocabulary in draw.logits():
        probs, uniform = draw.probs(rows, vocabulary, 3.0), draw.rand(rows)
        others = (
            Alternative("multinomial", lambda probs, *_: torch.multinomial(probs, 1)),
            *flashinfer("sampling.sampling_from_probs", Arguments((probs,))),
        )
        size = f"{rows} x {vocabulary}"
        yield Point(size, draw.args(probs, uniform), moved(probs), alternatives=others)
        k, p = draw.full((rows,), 50, torch.int32), draw.full((rows,), 0.95)
        given = Arguments((probs, 50, 0.95))
        others = (
            Alternative("definition", draw_from_probs.reference),
            *flashinfer("sampling.top_k_top_p_sampling_from_probs", given),
        )
        both = f"{size}, top 50 and 0.95"
        yield Point(both, draw.args(probs, uniform, k, p), moved(probs), alternatives=others)
        others = (
            Alternative("definition", draw_from_probs.reference),
            *flashinfer("sampling.top_p_sampling_from_probs", Arguments((probs, 0.95))),
        )
        share = draw.args(probs, uniform, None, p)
        yield Point(f"{size}, 0.95", share, moved(probs), alternatives=others)


@draw_tokens.bench
def _(draw: Draw) -> Points:
    for rows, vocabulary in draw.logits():
        logits = draw.randn(rows, vocabulary, dtype=torch.float32, scale=3.0)
        seeds, temperature = draw.randint(0, 1 << 62, rows), draw.full((rows,), 0.8)
        # A few tokens have nearly all of the probability mass, as with trained models.
        peaked = logits * logits.abs() / 10
        filters = (
            *(("no filter", logits, -1, 1.0), ("top 50 and 0.95", logits, 50, 0.95)),
            *(("0.95", logits, -1, 0.95), ("0.95, few likely", peaked, -1, 0.95)),
        )
        for name, values, k, p in filters:
            top_k, top_p = draw.full((rows,), k, torch.int64), draw.full((rows,), p)
            min_p = draw.full((rows,), 0.0)
            yield Point(
                f"{rows} x {vocabulary}, {name}",
                draw.args(values, temperature, top_k, top_p, min_p, seeds, draw.arange(rows)),
                moved(values),
                alternatives=(Alternative("definition", draw_tokens.reference),),
            )


@min_p_renorm_probs.bench
def _(draw: Draw) -> Points:
    for rows, vocabulary in draw.logits():
        probs, min_p = draw.probs(rows, vocabulary, 3.0), draw.rand(rows) * 0.1
        yield Point(
            f"{rows} x {vocabulary}", draw.args(probs, min_p), moved(probs, probs), definition=True
        )


def _by_log_softmax(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, tokens[:, None])
    return chosen, (logprobs > chosen).sum(dim=-1) + 1


@score_tokens.bench
def _(draw: Draw) -> Points:
    for rows, vocabulary in draw.logits():
        logits = draw.randn(rows, vocabulary, dtype=torch.float32)
        tokens = draw.randint(0, vocabulary, rows)
        others = (Alternative("log_softmax", _by_log_softmax),)
        size = f"{rows} x {vocabulary}"
        yield Point(
            size, draw.args(logits, tokens), moved(logits), alternatives=others, definition=True
        )


def _topk(logits: Tensor, top_k: Tensor) -> Tensor:
    """By torch.topk, where the host knows the largest k."""
    least = logits.topk(50, dim=-1).values.gather(-1, top_k.long()[:, None] - 1)
    return logits.masked_fill(logits < least, -torch.inf)


@top_k_mask.bench
def _(draw: Draw) -> Points:
    for rows, vocabulary in draw.logits():
        logits = draw.randn(rows, vocabulary, dtype=torch.float32)
        top_k = draw.randint(1, 51, rows, dtype=torch.int32)
        others = (Alternative("topk", _topk), *flashinfer("sampling.top_k_mask_logits"))
        size = f"{rows} x {vocabulary}"
        yield Point(
            size,
            draw.args(logits, top_k),
            moved(logits, logits),
            alternatives=others,
            definition=True,
        )


@top_k_renorm.bench
def _(draw: Draw) -> Points:
    for rows, vocabulary in draw.logits():
        probs = draw.probs(rows, vocabulary, 3.0)
        top_k = draw.randint(1, 51, rows, dtype=torch.int32)
        others = flashinfer("sampling.top_k_renorm_probs")
        size = f"{rows} x {vocabulary}"
        yield Point(
            size, draw.args(probs, top_k), moved(probs, probs), alternatives=others, definition=True
        )


@draw_from_logits.bench
def _(draw: Draw) -> Points:
    for rows, vocabulary in draw.logits():
        logits = draw.randn(rows, vocabulary, dtype=torch.float32, scale=3.0)
        k, p = draw.full((rows,), 50, torch.int32), draw.full((rows,), 0.95)
        given = Arguments((logits, 50, 0.95))
        others = (
            Alternative("definition", draw_from_logits.reference),
            *flashinfer("sampling.top_k_top_p_sampling_from_logits", given),
        )
        size = f"{rows} x {vocabulary}, top 50 and 0.95"
        arguments_ = draw.args(logits, draw.rand(rows), k, p)
        yield Point(size, arguments_, moved(logits), alternatives=others)


@top_p_renorm.bench
def _(draw: Draw) -> Points:
    for rows, vocabulary in draw.logits():
        probs, top_p = draw.probs(rows, vocabulary, 3.0), draw.rand(rows) * 0.2 + 0.8
        others = flashinfer("sampling.top_p_renorm_probs")
        size = f"{rows} x {vocabulary}"
        yield Point(
            size, draw.args(probs, top_p), moved(probs, probs), alternatives=others, definition=True
        )
