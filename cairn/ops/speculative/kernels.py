"""Kernels on trees of drafted tokens: one program per request, which walks the tree in the order of
the reference implementations."""

from __future__ import annotations

from cairn.ops.gpu import tl, triton


@triton.jit
def parents_of(own, parent_list, topk, width, nodes, NP: tl.constexpr):
    """[NP] int32 parents of nodes with the drafted numbers own [NP], -1: none; -1 without one."""
    expansion = own // topk
    known = (own >= 0) & (expansion < width)
    wanted = tl.load(parent_list + expansion, mask=known & (expansion > 0), other=-1)
    column = tl.arange(0, NP)
    same = (own[None, :] == wanted[:, None]) & (column > 0)[None, :] & (column < nodes)[None, :]
    found = tl.min(tl.where(same, column[None, :], NP), 1)
    parent = tl.where(known & (found < NP), found, -1)
    return tl.where(known & (expansion == 0), 0, parent)


@triton.jit
def store_links(parent, next_token, next_sibling, nodes, NP: tl.constexpr):
    """Write the first child and the next sibling of every node, from its parent [NP]."""
    node = tl.arange(0, NP)
    inside = node < nodes
    child = inside[:, None] & (parent[:, None] == node[None, :])
    first = tl.min(tl.where(child, node[:, None], NP), 0)
    tl.store(next_token + node, tl.where(first < NP, first, -1).to(tl.int64), mask=inside)
    sibling = (parent[:, None] == parent[None, :]) & (parent >= 0)[:, None]
    sibling = sibling & (node[None, :] > node[:, None]) & inside[None, :]
    later = tl.min(tl.where(sibling, node[None, :], NP), 1)
    tl.store(next_sibling + node, tl.where(later < NP, later, -1).to(tl.int64), mask=inside)


@triton.jit(do_not_specialize=["topk", "width", "nodes"])
def build_kernel(
    parent_list, selected_index, verified_seq_len, tree_mask, positions,
    retrive_index, retrive_next_token, retrive_next_sibling,
    topk, width, nodes,
    MODE: tl.constexpr, BYTES: tl.constexpr, NP: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Kernel of `build_tree_kernel_efficient`, one request per program; tree_mask is viewed as
    bytes, NP = 2 ** ROUNDS."""
    batch = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NP)
    inside = node < nodes
    selected = selected_index + batch * (nodes - 1)
    own = tl.load(selected + node - 1, mask=inside & (node > 0), other=-1)
    expanded = parent_list + batch * width
    parent = parents_of(own, expanded, topk, width, nodes, NP)
    near = (node[:, None] == node[None, :]) | (parent[:, None] == node[None, :])
    reach = (near | (node == 0)[None, :]).to(tl.float32)
    # Pointer doubling: each round doubles the distance reached. The number of rounds is fixed,
    # because a malformed list may contain cycles.
    for _ in range(ROUNDS):
        further = tl.dot(reach, reach, input_precision="tf32")
        reach = tl.where(further > 0.0, 1.0, 0.0)
    seen = (reach > 0.0) & inside[None, :]
    length = tl.load(verified_seq_len + batch).to(tl.int64)
    line = batch * nodes + node
    count = tl.sum(seen.to(tl.int32), 1) - 1
    tl.store(positions + line, length + count, mask=inside)
    tl.store(retrive_index + line, line, mask=inside)
    base = batch * nodes
    store_links(
        parent, retrive_next_token + base, retrive_next_sibling + base, nodes, NP
    )  # fmt: skip
    if MODE == 2:
        for byte in tl.static_range(BYTES):
            bit = node - 8 * byte
            worth = tl.where((bit >= 0) & (bit < 8), 1 << (bit & 7), 0)
            packed = tl.sum(tl.where(seen, worth[None, :], 0), 1)
            tl.store(tree_mask + line * BYTES + byte, packed.to(tl.uint8), mask=inside)
    else:
        begin = base * nodes
        row = tl.zeros([], tl.int64) + nodes
        if MODE == 0:
            row += length
            for start in range(0, tl.program_id(0), 128):
                before = start + tl.arange(0, 128)
                ahead = before < tl.program_id(0)
                lengths = tl.load(verified_seq_len + before, mask=ahead, other=0).to(tl.int64)
                begin += tl.sum(lengths, 0) * nodes
        at = tree_mask + begin + node[:, None] * row + (row - nodes) + node[None, :]
        tl.store(at, seen.to(tl.uint8), mask=inside[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["nodes"])
def reconstruct_kernel(
    tree_mask, verified_seq_len, positions, retrive_index, retrive_next_token,
    retrive_next_sibling, nodes, NP: tl.constexpr,
):  # fmt: skip
    """Kernel of `reconstruct_indices_from_tree_mask`, one request per program."""
    batch = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NP)
    inside = node < nodes
    base = batch * nodes
    at = tree_mask + (base + node[:, None]) * nodes + node[None, :]
    mask = tl.load(at, mask=inside[:, None] & inside[None, :], other=0) != 0
    above = mask & (node[None, :] < node[:, None])
    parent = tl.max(tl.where(above, node[None, :], -1), 1)
    length = tl.load(verified_seq_len + batch).to(tl.int64)
    line = base + node
    tl.store(positions + line, length + tl.sum(above.to(tl.int32), 1), mask=inside)
    tl.store(retrive_index + line, line, mask=inside)
    # The first later node below this one, whether or not this is its nearest ancestor.
    below = mask & (node[None, :] < node[:, None])
    first = tl.min(tl.where(below, node[:, None], NP), 0)
    tl.store(
        retrive_next_token + line, tl.where(first < NP, first, -1).to(tl.int64), mask=inside
    )  # fmt: skip
    sibling = (parent[:, None] == parent[None, :]) & (parent >= 0)[:, None]
    sibling = sibling & (node[None, :] > node[:, None]) & inside[None, :]
    later = tl.min(tl.where(sibling, node[None, :], NP), 1)
    tl.store(
        retrive_next_sibling + line, tl.where(later < NP, later, -1).to(tl.int64), mask=inside
    )  # fmt: skip


@triton.jit(do_not_specialize=["nodes", "longest"])
def greedy_kernel(
    predicts, accept_index, accept_token_num, candidates,
    retrive_index, retrive_next_token, retrive_next_sibling, target_predict, nodes, longest,
):  # fmt: skip
    """The path of one request's tree that the target's own predictions take."""
    batch = tl.program_id(0).to(tl.int64)
    base = batch * nodes
    last = tl.load(retrive_index + base)
    wanted = tl.load(target_predict + last)
    tl.store(predicts + last, wanted.to(tl.int32))
    tl.store(accept_index + batch * longest, last.to(tl.int32))
    accepted = 0
    child = tl.load(retrive_next_token + base)
    looks = 1
    while (child >= 0) & (looks < nodes) & (accepted + 1 < longest):
        looks += 1
        if tl.load(candidates + base + child).to(tl.int64) == wanted.to(tl.int64):
            accepted += 1
            last = tl.load(retrive_index + base + child)
            wanted = tl.load(target_predict + last)
            tl.store(predicts + last, wanted.to(tl.int32))
            tl.store(accept_index + batch * longest + accepted, last.to(tl.int32))
            child = tl.load(retrive_next_token + base + child)
        else:
            child = tl.load(retrive_next_sibling + base + child)
    tl.store(accept_token_num + batch, accepted)


@triton.jit(do_not_specialize=["nodes", "longest"])
def sampled_path_kernel(
    predicts, accept_index, accept_token_num, candidates,
    retrive_index, retrive_next_token, retrive_next_sibling, uniform, target_probs, draft_probs,
    where, threshold_single, threshold_acc, nodes, longest, vocabulary,
):  # fmt: skip
    """The path of one request's tree that its coins accept.

    where: [2, B] int64, written: the last node of the path, and its number in the batch.
    """
    batch = tl.program_id(0).to(tl.int64)
    base = batch * nodes
    last = tl.load(retrive_index + base)
    tl.store(accept_index + batch * longest, last.to(tl.int32))
    coin = tl.load(uniform + base)
    mass = coin * 0.0
    accepted = 0
    node = last * 0
    child = tl.load(retrive_next_token + base)
    looks = 1
    while (child >= 0) & (looks < nodes) & (accepted + 1 < longest):
        looks += 1
        token = tl.load(candidates + base + child).to(tl.int64)
        at = (base + node) * vocabulary + token
        chance = tl.load(target_probs + at)
        mass += chance
        if (coin <= tl.div_rn(mass, threshold_acc)) | (chance >= threshold_single):
            accepted += 1
            tl.store(predicts + last, token.to(tl.int32))
            last = tl.load(retrive_index + base + child)
            tl.store(accept_index + batch * longest + accepted, last.to(tl.int32))
            coin = tl.load(uniform + base + child)
            mass = coin * 0.0
            node = child
            child = tl.load(retrive_next_token + base + child)
        else:
            tl.store(draft_probs + at, chance)
            child = tl.load(retrive_next_sibling + base + child)
    tl.store(accept_token_num + batch, accepted)
    tl.store(where + batch, base + node)
    tl.store(where + tl.num_programs(0) + batch, last)


@triton.jit
def left_over(target_probs, draft_probs, at, inside, whole):
    """Unnormalised probabilities of the final token: the target's, minus the draft's unless
    `whole`."""
    mass = tl.load(target_probs + at, mask=inside, other=0.0)
    taken = tl.load(draft_probs + at, mask=inside & (whole == 0), other=0.0)
    return tl.maximum(mass - taken, 0.0).to(tl.float64)


@triton.jit(do_not_specialize=["longest", "chunks"])
def final_mass_kernel(
    accept_token_num, target_probs, draft_probs, where, masses,
    longest, vocabulary, chunks, BLOCK: tl.constexpr,
):  # fmt: skip
    """masses [B, chunks] float64: sums of the final token's unnormalised probabilities, per chunk
    of the vocabulary."""
    batch = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    whole = (tl.load(accept_token_num + batch) == longest - 1).to(tl.int32)
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(where + batch) * vocabulary + token
    mass = left_over(target_probs, draft_probs, at, token < vocabulary, whole)
    tl.store(masses + batch * chunks + chunk, tl.sum(mass, 0))


@triton.jit(do_not_specialize=["longest", "chunks"])
def final_token_kernel(
    predicts, accept_token_num, target_probs, draft_probs, where, masses, uniform,
    longest, vocabulary, chunks, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Draw the token after the path: the first whose cumulative mass exceeds uniform * the
    total."""
    batch = tl.program_id(0).to(tl.int64)
    whole = (tl.load(accept_token_num + batch) == longest - 1).to(tl.int32)
    c = tl.arange(0, CHUNKS)
    part = tl.load(masses + batch * chunks + c, mask=c < chunks, other=0.0)
    running = tl.cumsum(part, 0)
    target = tl.load(uniform + batch).to(tl.float64) * tl.sum(part, 0)
    able = part > 0.0
    hit = tl.min(tl.where(able & (running > target), c, CHUNKS), 0)
    chunk = tl.where(hit < CHUNKS, hit, tl.max(tl.where(able, c, -1), 0))
    target -= tl.sum(tl.where(c < chunk, part, 0.0), 0)
    token = tl.maximum(chunk, 0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(where + batch) * vocabulary + token
    mass = left_over(target_probs, draft_probs, at, token < vocabulary, whole)
    drawable = mass > 0.0
    beyond = drawable & (tl.cumsum(mass, 0) > target)
    first = tl.min(tl.where(beyond, token, 0x7FFFFFFF), 0)
    last = tl.max(tl.where(drawable, token, -1), 0)
    found = tl.where(first < 0x7FFFFFFF, first, last)
    found = tl.where(chunk < 0, vocabulary - 1, found)
    last_node = tl.load(where + tl.num_programs(0) + batch)
    tl.store(predicts + last_node, found.to(tl.int32))


@triton.jit
def packbits_kernel(x, input_indptr, output_indptr, y, BLOCK: tl.constexpr):
    """Bytes of a segment, shared by the programs of one line of the grid."""
    segment = tl.program_id(0)
    begin = tl.load(input_indptr + segment).to(tl.int64)
    count = tl.load(input_indptr + segment + 1).to(tl.int64) - begin
    out = tl.load(output_indptr + segment).to(tl.int64)
    bit = tl.arange(0, 8)
    for start in range(tl.program_id(1) * BLOCK, (count + 7) // 8, tl.num_programs(1) * BLOCK):
        byte = start + tl.arange(0, BLOCK).to(tl.int64)
        place = byte[:, None] * 8 + bit[None, :]
        if (begin % 8 == 0) & ((start + BLOCK) * 8 <= count):
            # Load eight flags at once.
            flags = tl.load(x + tl.multiple_of(begin, 8) + place)
        else:
            flags = tl.load(x + begin + place, mask=place < count, other=0)
        packed = tl.sum(tl.where(flags != 0, (1 << bit)[None, :], 0), 1)
        tl.store(y + out + byte, packed.to(tl.uint8), mask=byte * 8 < count)


@triton.jit(do_not_specialize=["nobody", "count"])
def chains_kernel(tokens, given, row, out, nobody, count):
    """A chain of `verify_chains`, walked by the program of its first entry."""
    begin = tl.program_id(0)
    if (begin == 0) | (tl.load(given + begin) < 0):
        end, last, right = begin, begin, True
        draft = tl.load(tokens + begin) * 0
        while draft >= 0:
            tl.store(out + end, tl.zeros([], tl.int64) + nobody)
            tl.store(out + count + end, tl.zeros([], tl.int64))
            draft = tl.load(given + end + 1, mask=end + 1 < count, other=-1)
            right = right & (draft >= 0) & (draft == tl.load(tokens + end))
            end += 1
            last = tl.where(right, end, last)
        tl.store(out + last, tl.load(row + last))
        tl.store(out + count + last, (last - begin + 1).to(tl.int64))
