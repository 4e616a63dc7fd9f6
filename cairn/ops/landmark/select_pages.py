"""Selection of the pages with the best landmark scores, one set per KV head."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import cpu, gpu
from cairn.ops.attention import paging
from cairn.ops.call import Call
from cairn.ops.checks import FLOAT32, FLOATS, check_min, check_slots, expect
from cairn.ops.landmark import loops, select_cpu, select_launch
from cairn.ops.landmark.checks import check_rule, check_summaries
from cairn.ops.landmark.select_task import NO_PAGE, candidate_pages, store, task_of
from cairn.ops.landmark.tuning import TUNING
from cairn.ops.registry import op


@op
def select_pages(
    lmk_q: Tensor,
    summary_key: Tensor,
    summary_bias: Tensor | None,
    lse: Tensor,
    row: Tensor,
    slot: Tensor,
    page_table: Tensor,
    page_size: int,
    window: int,
    topk: int,
    scale: float | None = None,
    strategy: str = "hils",
    num_kv_heads: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The topk candidate pages with the largest scores; ties go to the lower page.

    Candidates of slot s are the pages j < floor((s - window + 1) / S): those left of the aligned
    window. With u = scale * z . R_j + b_j per query head, the score of a KV head's group is

    * hils, softmax_head: max over its heads of u - logaddexp(lse, logsumexp over candidates of u)
    * head: max over its heads of u
    * group: scale * (sum over its heads of z) . R_j

    softmax_head with a window of 0 has the candidates j < floor(s / S).

    Args:
        lmk_q: z [T, h_q, d].
        summary_key: R [pages, h_R, d], any strides; h_R = h_q or h_kv. (group: h_q < h_kv is
            allowed; then the groups are the query heads, each with the sum of its summaries.)
        summary_bias: b [pages, h_q] float32, or None for 0.
        lse: [T, h_q] float32, of the window; not used by head and group.
        row, slot: [T] int64.
        page_table: [rows, max_pages] int32, logical to physical page.
        page_size: S.
        window: slots, >= 0; hils: >= 1.
        topk: K.
        scale: None: d ** -0.5.
        strategy: one of STRATEGIES.
        num_kv_heads: h_kv; None: h_R.
    Returns:
        indices [T, h_kv, K] int32, logical pages ascending, padded with -1; scores [T, h_q, K]
        float32, u of those pages (group: [T, h_kv, K]), padded with -inf.
    Raises:
        BadArgument: for another shape, dtype, device or layout, an unknown strategy, or a window
            that the strategy does not allow.
    """
    task = task_of(lmk_q, summary_key, strategy, scale, num_kv_heads)
    candidates = candidate_pages(slot, page_size, window, strategy)
    tokens = slot.numel()
    indices, scores = task.empty(tokens, topk, slot.device)
    pages = int(candidates.max()) if tokens else 0
    block = paging.tokens_per_block(4 * pages * summary_key.shape[1] * lmk_q.shape[2], tokens)
    for begin in range(0, tokens if pages else 0, block):
        at = slice(begin, begin + block)
        physical = page_table[row[at], :pages].long()
        keys = task.keys(summary_key[physical])
        queries = task.queries(lmk_q[at].unsqueeze(1))
        u = torch.bmm(queries, keys.transpose(1, 2)).view(physical.shape[0], -1, pages)
        if summary_bias is not None:
            u += summary_bias[physical].transpose(1, 2)
        u.masked_fill_(
            (torch.arange(pages, device=u.device) >= candidates[at, None])[:, None], -torch.inf
        )
        score = u
        if task.normalised:
            score = u - torch.logaddexp(lse[at], u.logsumexp(dim=-1)).unsqueeze(-1)
        score = score.unflatten(1, (task.groups, -1)).amax(dim=2)
        best = score.sort(dim=-1, descending=True, stable=True).indices[..., :topk]
        found = best.masked_fill_(best >= candidates[at, None, None], NO_PAGE).sort(dim=-1).values
        store(indices, scores, at, found.unsqueeze(2), u.unsqueeze(2), task)
    return indices, scores


@select_pages.check
def _(call: Call) -> None:
    name = "select_pages"
    check_rule(name, call.window, call.topk, call.strategy, 1 if call.strategy == "hils" else 0)
    check_min(name, "page_size", call.page_size, 1)
    expect(name, "lmk_q", call.lmk_q, 3, FLOATS)
    check_summaries(
        name,
        call.lmk_q,
        call.summary_key,
        call.summary_bias,
        None,
        call.num_kv_heads,
        call.strategy,
    )
    tokens, heads, _ = call.lmk_q.shape
    expect(name, "lse", call.lse, (tokens, heads), FLOAT32, call.lmk_q, -1)
    check_slots(name, tokens, call.row, call.slot, call.page_table, call.lmk_q)


@select_pages.fake
def _(call: Call) -> tuple[Tensor, Tensor]:
    task = task_of(call.lmk_q, call.summary_key, call.strategy, call.scale, call.num_kv_heads)
    return task.empty(call.lmk_q.shape[0], call.topk, call.slot.device)


@select_pages.implementation("row_tiles", devices=cpu.DEVICES)
def _(call: Call) -> tuple[Tensor, Tensor]:
    task = task_of(call.lmk_q, call.summary_key, call.strategy, call.scale, call.num_kv_heads)
    candidates = candidate_pages(call.slot, call.page_size, call.window, call.strategy)
    indices, scores = task.empty(call.slot.numel(), call.topk, call.slot.device)
    for tokens, pages in select_cpu.tiles(call.row, candidates):
        safe = tokens.clamp(max=call.slot.numel() - 1)
        # Pad the columns to a multiple of 16 for the matrix product.
        columns = -(-pages // 16) * 16
        physical = call.page_table[call.row[safe[:, 0]], :columns]
        bias = None if call.summary_bias is None else select_cpu.gather(call.summary_bias, physical)
        keys = select_cpu.gather(call.summary_key, physical)
        score = select_cpu.Scorer(task, call.lmk_q, keys, bias)
        limits = torch.where(tokens < call.slot.numel(), candidates[safe], 0)
        bytes_per_token = 4 * tokens.shape[0] * task.score_heads * pages
        step = paging.tokens_per_block(bytes_per_token, tokens.shape[1])
        for begin in range(0, tokens.shape[1], step):
            at = (slice(None), slice(begin, begin + step))
            u = score(safe[at])
            given = (u, call.lse, limits[at].contiguous(), tokens[at].contiguous())
            loops.choose_pages(
                *map(cpu.as_array, given), task.normalised, *map(cpu.as_array, (indices, scores))
            )
    return indices, scores


def _selection(call: Call) -> select_launch.Selection:
    task = task_of(call.lmk_q, call.summary_key, call.strategy, call.scale, call.num_kv_heads)
    offset = call.window - 1 if call.window or call.strategy != "softmax_head" else 0
    return select_launch.Selection(
        call.lmk_q,
        call.summary_key,
        call.summary_bias,
        call.lse,
        call.row,
        call.slot,
        call.page_table,
        call.page_size,
        call.topk,
        task.scale,
        offset,
        task.groups,
        task.normalised,
    )


def _few_on_gpu(call: Call) -> bool:
    return call.lmk_q.shape[0] <= TUNING.select_few_tokens and _on_gpu(call)


def _on_gpu(call: Call) -> bool:
    groups = min(call.lmk_q.shape[1], call.num_kv_heads or call.summary_key.shape[1])
    return call.strategy != "group" and select_launch.accepts(
        call.lmk_q, call.summary_key, call.page_table, groups, call.topk
    )


@select_pages.implementation("triton_few", devices=gpu.DEVICES, when=_few_on_gpu, replayed=True)
def _(call: Call) -> tuple[Tensor, Tensor]:
    return select_launch.select(_selection(call), few=True)


@select_pages.implementation("triton_many", devices=gpu.DEVICES, when=_on_gpu, replayed=True)
def _(call: Call) -> tuple[Tensor, Tensor]:
    return select_launch.select(_selection(call), few=False)


def _group_on_gpu(call: Call) -> bool:
    groups = min(call.lmk_q.shape[1], call.num_kv_heads or call.summary_key.shape[1])
    return (
        call.strategy == "group"
        and call.summary_key.shape[1] == groups
        and select_launch.accepts(call.lmk_q, call.summary_key, call.page_table, groups, call.topk)
    )


@select_pages.implementation("triton_group", devices=gpu.DEVICES, when=_group_on_gpu)
def _(call: Call) -> tuple[Tensor, Tensor]:
    """One head per group, the sum of its queries in float32, by the kernels for few tokens."""
    groups = min(call.lmk_q.shape[1], call.num_kv_heads or call.summary_key.shape[1])
    summed = call.lmk_q.float().unflatten(1, (groups, -1)).sum(dim=2)
    scale = call.lmk_q.shape[2] ** -0.5 if call.scale is None else call.scale
    job = _selection(call.replaced(lmk_q=summed, scale=scale, strategy="head", num_kv_heads=groups))
    return select_launch.select(job, few=True)
