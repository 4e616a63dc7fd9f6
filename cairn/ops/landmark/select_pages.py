"""Which pages a token reads: the best by landmark score, one set per KV head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cairn.ops.attention import paging
from cairn.ops.registry import op
from cairn.ops.testing import Cases, Make

STRATEGIES = ("hils", "softmax_head", "head", "group")
_TILE = 256
"""Tokens of one row that share a gather of its summaries."""
_NO_PAGE = 2**31 - 1


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
    """The topk candidate pages of largest score; among equal ones the lower page id.

    Candidates of slot s are the pages j < floor((s - window + 1) / S): those left of the aligned
    window. With u = scale * z . R_j + b_j per query head, the score of a KV head's group is

    * hils, softmax_head: max over its heads of u - logaddexp(lse, logsumexp over candidates of u)
    * head: max over its heads of u
    * group: scale * (sum over its heads of z) . R_j

    softmax_head with a window of 0 has the candidates j < floor(s / S).

    Args:
        lmk_q: z [T, h_q, d].
        summary_key: R [pages, h_R, d], any strides; h_R = h_q or h_kv. (group: also h_q < h_kv,
            then the groups are the query heads, each with the sum of its summaries.)
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
        ValueError: for an unknown strategy, or a window that it cannot have.
    """
    task = _task(lmk_q, summary_key, strategy, scale, num_kv_heads)
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
        found = best.masked_fill_(best >= candidates[at, None, None], _NO_PAGE).sort(dim=-1).values
        _store(indices, scores, at, found.unsqueeze(2), u.unsqueeze(2), task)
    return indices, scores


def candidate_pages(slot: Tensor, page_size: int, window: int, strategy: str = "hils") -> Tensor:
    """Number of candidate pages of a slot, >= 0 ([T] int64): pages 0 .. that number - 1.

    Raises ValueError for a window that the strategy cannot have.
    """
    if window < (1 if strategy == "hils" else 0):
        raise ValueError(f"select_pages: {strategy} cannot have a window of {window} slots")
    if strategy == "softmax_head" and window == 0:
        return slot // page_size
    return ((slot - (window - 1)) // page_size).clamp(min=0)


@dataclass(frozen=True)
class _Task:
    """What a strategy means for the tensors.

    Attributes:
        groups: sets of pages per token, h_kv.
        summed: the queries of a group are added before scoring.
        normalised: scores are compared after each head's normaliser is taken off.
        score_heads: heads of the scores.
        key_heads: heads of the keys that are scored, after any summing.
        scale: of the dot products.
    """

    groups: int
    summed: bool
    normalised: bool
    score_heads: int
    key_heads: int
    scale: float

    def empty(self, tokens: int, topk: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Results in which nothing is selected."""
        indices = torch.full((tokens, self.groups, topk), -1, dtype=torch.int32, device=device)
        scores = torch.full((tokens, self.score_heads, topk), -torch.inf, device=device)
        return indices, scores

    def keys(self, summaries: Tensor) -> Tensor:
        """[U, P, h_R, d] -> float32 [U * key_heads, P, d]."""
        count, pages, heads, dim = summaries.shape
        keys = summaries.float()
        if heads > self.key_heads:
            keys = keys.unflatten(2, (self.key_heads, -1)).sum(dim=3)
        return keys.transpose(1, 2).reshape(count * self.key_heads, pages, dim)

    def queries(self, lmk_q: Tensor) -> Tensor:
        """[U, c, h_q, d] -> scaled float32 [U * key_heads, heads per key head * c, d]."""
        count, tokens, _, dim = lmk_q.shape
        queries = lmk_q.float() * self.scale
        if self.summed:
            queries = queries.unflatten(2, (self.groups, -1)).sum(dim=3)
        queries = queries.view(count, tokens, self.key_heads, -1, dim).permute(0, 2, 3, 1, 4)
        return queries.reshape(count * self.key_heads, -1, dim)


def _task(
    lmk_q: Tensor, summary_key: Tensor, strategy: str, scale: float | None, kv_heads: int | None
) -> _Task:
    if strategy not in STRATEGIES:
        raise ValueError(f"select_pages: unknown strategy {strategy!r}, not in {STRATEGIES}")
    heads, dim = lmk_q.shape[1:]
    factor = dim**-0.5 if scale is None else scale
    groups = min(heads, kv_heads or summary_key.shape[1])
    if strategy == "group":
        return _Task(groups, True, False, groups, groups, factor)
    # With one head a group the normaliser is one constant per set and changes nothing.
    normalised = strategy != "head" and heads > groups
    return _Task(groups, False, normalised, heads, summary_key.shape[1], factor)


def _store(
    indices: Tensor,
    scores: Tensor,
    at: Tensor | slice,
    found: Tensor,
    u: Tensor,
    task: _Task,
) -> None:
    """Write selected pages and their u.

    Args:
        indices, scores: the results, changed.
        at: tokens, N of them; every token of the results at most once, but for the last line.
        found: [U, h_kv, c, k] int64 ascending, U * c = N, k <= K, _NO_PAGE where there is none.
        u: [U, h, c, P].
    """
    count, groups, tokens, width = found.shape
    none = found == _NO_PAGE
    place = found.masked_fill(none, 0).unsqueeze(2)
    u = u.view(count, groups, -1, tokens, u.shape[-1])
    taken = u.gather(-1, place.expand(-1, -1, u.shape[2], -1, -1))
    taken = taken.masked_fill_(none.unsqueeze(2), -torch.inf).permute(0, 3, 1, 2, 4)
    scores[at, :, :width] = taken.reshape(count * tokens, task.score_heads, width)
    found = found.masked_fill(none, -1).to(torch.int32).transpose(1, 2)
    indices[at, :, :width] = found.reshape(count * tokens, groups, width)


@select_pages.fake
def _(
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
    task = _task(lmk_q, summary_key, strategy, scale, num_kv_heads)
    return task.empty(lmk_q.shape[0], topk, slot.device)


@select_pages.implementation(
    "one_token",
    devices=("cpu",),
    when=lambda lmk_q, *args, **kwargs: lmk_q.shape[0] == 1,
)
def _(
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
    task = _task(lmk_q, summary_key, strategy, scale, num_kv_heads)
    pages = int(candidate_pages(slot, page_size, window, strategy))
    indices, scores = task.empty(1, topk, slot.device)
    if pages == 0:
        return indices, scores
    # The page after the candidates exists, in the window; its column will hold the lse.
    physical = page_table[int(row), : pages + task.normalised]
    keys = task.keys(_gather(summary_key, physical).unsqueeze(0))
    u = torch.bmm(task.queries(lmk_q.unsqueeze(1)), keys.transpose(1, 2))
    u = u.view(-1, physical.numel())
    if summary_bias is not None:
        u += _gather(summary_bias, physical).t()
    score = u
    if pages <= topk:
        found = torch.arange(pages).expand(task.groups, pages)
    else:
        if task.normalised:
            # One more column with the window's lse makes log_softmax u - Z.
            u[:, pages] = lse[0]
            score = torch.log_softmax(u, dim=-1)
        score = score[:, :pages].unflatten(0, (task.groups, -1)).amax(dim=1)
        found = _topk(score, topk).sort(dim=-1).values
    width = found.shape[-1]
    indices[0, :, :width] = found
    place = found.repeat_interleave(u.shape[0] // task.groups, dim=0)
    torch.gather(u, 1, place, out=scores[0, :, :width])
    return indices, scores


@select_pages.implementation("row_tiles", devices=("cpu",))
def _(
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
    task = _task(lmk_q, summary_key, strategy, scale, num_kv_heads)
    candidates = candidate_pages(slot, page_size, window, strategy)
    # One line more than tokens takes what empty places of the tiles compute.
    indices, scores = task.empty(slot.numel() + 1, topk, slot.device)
    for tokens, pages in _tiles(row, candidates):
        safe = tokens.clamp(max=slot.numel() - 1)
        # The page after the candidates exists, in the window; its column will hold the lse. Those
        # after it make a round number for the matrix product.
        columns = -(-(pages + task.normalised) // 16) * 16
        physical = page_table[row[safe[:, 0]], :columns]
        keys = task.keys(_gather(summary_key, physical)).transpose(1, 2)
        bias = None if summary_bias is None else _gather(summary_bias, physical).transpose(1, 2)
        limits = torch.where(tokens < slot.numel(), candidates[safe], 0)
        bytes_per_token = 4 * tokens.shape[0] * task.score_heads * pages
        step = paging.tokens_per_block(bytes_per_token, tokens.shape[1])
        for begin in range(0, tokens.shape[1], step):
            at = (slice(None), slice(begin, begin + step))
            u = _logits(task, lmk_q[safe[at]], keys, bias, limits[at], pages)
            found = _best(task, u, lse[safe[at]], limits[at], topk, pages)
            _store(indices, scores, tokens[at].reshape(-1), found, u, task)
    return indices[:-1], scores[:-1]


def _tiles(row: Tensor, candidates: Tensor) -> list[tuple[Tensor, int]]:
    """Batches of tiles of like size: (tokens [U, n], number of pages).

    A tile is up to _TILE tokens of one row; empty places hold T, never the first of a tile. A batch
    pads neither tokens nor pages to more than twice their number. Tokens without a candidate are
    left out.
    """
    total = row.numel()
    alive = (candidates > 0).nonzero()[:, 0]
    if alive.numel() == 0:
        return []
    most = int(candidates.max()) + 1
    key, order = (row[alive] * most + candidates[alive]).sort()
    counts = torch.unique_consecutive(key // most, return_counts=True)[1]
    per_row = (counts + (_TILE - 1)) // _TILE
    owner = torch.repeat_interleave(per_row)
    rank = torch.arange(owner.numel()) - (per_row.cumsum(0) - per_row)[owner]
    first = (counts.cumsum(0) - counts)[owner] + rank * _TILE
    filled = (counts[owner] - rank * _TILE).clamp(max=_TILE)
    pages = key[first + filled - 1] % most

    size = _bits(filled) * 64 + _bits(pages)
    batches = []
    for one in torch.unique(size).tolist():
        members = (size == one).nonzero()[:, 0]
        width = int(filled[members].max())
        place = torch.arange(width)
        position = (first[members, None] + place).clamp(max=order.numel() - 1)
        tokens = torch.where(place < filled[members, None], alive[order[position]], total)
        # A few tiles with many pages, or many with few: the same number of summaries a batch.
        step = max(1, 2048 // int(pages[members].max()))
        for part, some in zip(tokens.split(step), members.split(step), strict=True):
            batches.append((part, int(pages[some].max())))
    return batches


def _bits(number: Tensor) -> Tensor:
    """ceil(log2(number)) for number >= 1."""
    return torch.frexp((number - 1).double()).exponent.long()


def _gather(table: Tensor, physical: Tensor) -> Tensor:
    """table[physical]; whole lines are copied where the memory allows it."""
    if not table.is_contiguous():
        return table[physical]
    lines = table.view(table.shape[0], -1).index_select(0, physical.reshape(-1))
    return lines.view(*physical.shape, *table.shape[1:])


def _logits(
    task: _Task, lmk_q: Tensor, keys: Tensor, bias: Tensor | None, limits: Tensor, pages: int
) -> Tensor:
    """u [U, h, c, columns], -inf from each token's limit to the number of pages.

    Args:
        lmk_q: [U, c, h_q, d]; keys: [U * key_heads, d, columns]; bias: [U, h_q, columns] or None.
        limits: [U, c] candidates of every token.
        pages: of the batch; columns after them become -inf.
    """
    count, tokens = limits.shape
    queries = task.queries(lmk_q)
    if bias is not None and task.key_heads == task.score_heads:
        u = torch.baddbmm(bias.flatten(0, 1).unsqueeze(1), queries, keys)
    else:
        u = torch.bmm(queries, keys)
    u = u.view(count, task.score_heads, tokens, keys.shape[-1])
    if bias is not None and task.key_heads < task.score_heads:
        u += bias.unsqueeze(2)
    u[..., pages:] = -torch.inf
    low = int(limits.min())
    if low < pages:
        late = torch.arange(low, pages) >= limits.unsqueeze(-1)
        u[..., low:pages].masked_fill_(late.unsqueeze(1), -torch.inf)
    return u


def _best(task: _Task, u: Tensor, lse: Tensor, limits: Tensor, topk: int, pages: int) -> Tensor:
    """Selected pages [U, h_kv, c, min(K, P)] ascending, _NO_PAGE where there are fewer."""
    count, heads, tokens, _ = u.shape
    if pages <= topk:
        every = torch.arange(pages).expand(count, task.groups, tokens, pages)
        return every.masked_fill(every >= limits[:, None, :, None], _NO_PAGE)
    score = u
    if task.normalised:
        # One more column with the window's lse makes log_softmax u - Z.
        u[..., pages] = lse.transpose(1, 2)
        score = torch.log_softmax(u, dim=-1)
    score = score[..., :pages]
    if heads > task.groups:
        score = score.unflatten(1, (task.groups, -1)).amax(dim=2)
    places = _topk(score, topk)
    return places.masked_fill_(places >= limits[:, None, :, None], _NO_PAGE).sort(dim=-1).values


def _topk(score: Tensor, topk: int) -> Tensor:
    """Places of the topk largest along the last dim, longer than topk; of equal ones the first."""
    values, places = score.topk(topk + 1, dim=-1)
    last = values[..., topk - 1]
    tied = (last == values[..., topk]) & (last > -torch.inf)
    if bool(tied.any()):
        # torch.topk may keep any of equal ones: those lines are sorted, which can be stable.
        again = score[tied].sort(dim=-1, descending=True, stable=True).indices
        places[tied] = again[:, : topk + 1]
    return places[..., :topk]


@select_pages.cases
def _(make: Make) -> Cases:
    for dtype, size, groups, group in (
        (torch.float32, 8, 2, 4),
        (torch.bfloat16, 4, 1, 8),
        (torch.float32, 4, 3, 1),
    ):
        heads = groups * group
        lengths, counts = (175, 9, 190, 31), (100, 9, 1, 2)
        paged = make.paged(lengths, groups, size, 16, dtype=dtype)
        row, slot, _ = paged.queries(counts)
        pages = paged.k_cache.shape[0]
        z = make.randn(row.numel(), heads, 16, dtype=dtype)
        key = make.randn(pages, heads, 16, dtype=dtype)
        key[paged.page_table[:, -1].long()] = torch.nan
        bias = make.rand(pages, heads) * 3
        lse = make.randn(row.numel(), heads)
        where = (row, slot, paged.page_table, size, 2 * size + 1, 3)
        yield make.args(z, key, bias, lse, *where, num_kv_heads=groups)
        yield make.args(z, key, bias, lse, *where[:-1], 500, num_kv_heads=groups)
        landmark = paged.k_cache[:, :, -1]
        for strategy in STRATEGIES:
            yield make.args(z, landmark, None, lse, *where, strategy=strategy)
        # All scores equal: whole numbers, whose sums no order of addition can round apart.
        equal, whole = torch.ones_like(key), make.randint(-3, 4, *z.shape).to(dtype)
        yield make.args(whole, equal, None, lse, *where, num_kv_heads=groups)
        one = (row[-3:-2], slot[-3:-2], *where[2:])
        yield make.args(z[-3:-2], key, bias, lse[-3:-2], *one, 0.3, num_kv_heads=groups)
        none = (row[:0], slot[:0], *where[2:])
        yield make.args(z[:0], key, bias, lse[:0], *none, num_kv_heads=groups)
