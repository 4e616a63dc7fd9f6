"""Acceptance of drafted tokens under sampling, and the token drawn after them."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import expect, expect_within
from cairn.ops.registry import op
from cairn.ops.speculative.kernels import (
    final_mass_kernel,
    final_token_kernel,
    sampled_path_kernel,
)
from cairn.ops.speculative.trees import (
    ALIASES,
    expect_links,
    expect_outcome,
    expect_tree,
)

NAME = "tree_speculative_sampling_target_only"
MIN_THRESHOLD = 1e-9
"""Lower bound of threshold_acc, by which the cumulative mass is divided."""
_BLOCK = 2048
_CHANGED = ("predicts", "accept_index", "accept_token_num", "draft_probs")


@op(mutates=_CHANGED, aliases=ALIASES)
def tree_speculative_sampling_target_only(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Walk every tree from node 0 by coins, then draw one token more; the law is the target's.

    At a node with coin u, running mass 0: for each child in turn, with the token x and
    p = target_probs[node, x], add p to the mass; accept the child when u <= mass / threshold_acc or
    p >= threshold_single, and go on from it with its own coin and mass 0; else note
    draft_probs[node, x] = p and try its sibling. The walk ends where no child is accepted, or with
    S - 1 accepted; where links run in a circle, with n - 1 looks at a node. The last token is drawn
    from target_probs[node], less draft_probs[node] (never below 0) unless S - 1 were accepted: the
    first whose running mass, summed in float64, exceeds the final coin times all of it. Where
    nothing has mass it is V - 1.

    As keywords, names that begin with retrive_ may also begin with retrieve_.

    Args:
        predicts: [B * n] or longer, int32, written at the nodes of the path: the token that follows
            each.
        accept_index: [B, S] int32, written from the left: numbers of the path's nodes.
        accept_token_num: [B] int32, written: drafted tokens accepted.
        candidates: [B, n] int64 or int32, token of every node.
        retrive_index, retrive_next_token, retrive_next_sibling: [B, n] int64, the trees.
        uniform_samples: [B, n] float32 in [0, 1), coin of every node.
        uniform_samples_for_final_sampling: [B] float32 in [0, 1).
        target_probs: [B, n, V] float32.
        draft_probs: [B, n, V] float32, changed as above; zeros for a law that is exactly the
            target's.
        threshold_single, threshold_acc: 1: exact. Less accepts more. threshold_acc is 1e-9 at
            least.
        deterministic: ignored; the same arguments always give the same tokens.
    Raises:
        BadArgument: for another shape, dtype or device; on the CPU for links or candidates out of
            range.
    """
    led = expect_links(NAME, retrive_index, retrive_next_token, retrive_next_sibling)
    # The token of node 0 is not used.
    drafted = candidates[:, 1:][led[:, 1:]]
    expect_within(NAME, "candidates", drafted, target_probs.shape[2])
    trees = [x.tolist() for x in (candidates, retrive_index, retrive_next_token)]
    sibling_of = retrive_next_sibling.tolist()
    longest = accept_index.shape[1]
    # All values below are float32 tensors, so that sums and quotients round as the kernel's do.
    threshold = target_probs.new_tensor(max(threshold_acc, MIN_THRESHOLD))
    for row, (tokens, index, next_token) in enumerate(zip(*trees, strict=True)):
        path, node, child, looks = [index[0]], 0, next_token[0], 1
        coin, mass = uniform_samples[row, 0], uniform_samples.new_zeros(())
        while child >= 0 and looks < len(tokens) and len(path) < longest:
            looks += 1
            token = tokens[child]
            chance = target_probs[row, node, token]
            mass = mass + chance
            if coin <= mass / threshold or chance >= threshold_single:
                predicts[path[-1]] = token
                path.append(index[child])
                coin, mass = uniform_samples[row, child], torch.zeros_like(mass)
                node, child = child, next_token[child]
            else:
                draft_probs[row, node, token] = chance
                child = sibling_of[row][child]
        for place, number in enumerate(path):
            accept_index[row, place] = number
        accept_token_num[row] = len(path) - 1
        law = target_probs[row, node]
        if len(path) < longest:
            law = (law - draft_probs[row, node]).clamp(min=0)
        predicts[path[-1]] = _final(law, uniform_samples_for_final_sampling[row])


def _final(law: Tensor, coin: Tensor) -> int:
    """The first token of law [V] (unnormalised probabilities) whose cumulative mass exceeds coin *
    the total."""
    able = law > 0
    if not bool(able.any()):
        return law.numel() - 1
    running = law.double().cumsum(0)
    beyond = able & (running > coin.double() * running[-1])
    return int((beyond if bool(beyond.any()) else able).nonzero()[0 if bool(beyond.any()) else -1])


@tree_speculative_sampling_target_only.check
def _(call: Call) -> None:
    expect_outcome(NAME, call.predicts, call.accept_index, call.accept_token_num, call.candidates)
    expect_tree(
        NAME,
        call.retrive_index,
        call.retrive_next_token,
        call.retrive_next_sibling,
        call.candidates.shape,
    )
    expect(NAME, "retrive_index", call.retrive_index, like=call.candidates)
    batch, nodes = call.candidates.shape
    final = call.uniform_samples_for_final_sampling
    for what, tensor, shape in (
        ("uniform_samples", call.uniform_samples, (batch, nodes)),
        ("uniform_samples_for_final_sampling", final, (batch,)),
        ("target_probs", call.target_probs, (batch, nodes, None)),
        ("draft_probs", call.draft_probs, call.target_probs.shape),
    ):
        expect(NAME, what, tensor, shape, (torch.float32,), call.candidates, dense=-1)


@tree_speculative_sampling_target_only.implementation("triton", devices=gpu.DEVICES, replayed=True)
def _(call: Call) -> None:
    batch, nodes = call.candidates.shape
    if batch == 0:
        return
    longest, vocabulary = call.accept_index.shape[1], call.target_probs.shape[2]
    chunks = -(-vocabulary // _BLOCK)
    place = gpu.empty((2, batch), torch.int64, call.candidates.device)
    masses = gpu.empty((batch, chunks), torch.float64, call.candidates.device)
    sampled_path_kernel[(batch,)](
        predicts=call.predicts,
        accept_index=call.accept_index,
        accept_token_num=call.accept_token_num,
        candidates=call.candidates,
        retrive_index=call.retrive_index,
        retrive_next_token=call.retrive_next_token,
        retrive_next_sibling=call.retrive_next_sibling,
        uniform=call.uniform_samples,
        target_probs=call.target_probs,
        draft_probs=call.draft_probs,
        where=place,
        threshold_single=float(call.threshold_single),
        threshold_acc=float(max(call.threshold_acc, MIN_THRESHOLD)),
        nodes=nodes,
        longest=longest,
        vocabulary=vocabulary,
        num_warps=1,
    )
    final_mass_kernel[(batch, chunks)](
        accept_token_num=call.accept_token_num,
        target_probs=call.target_probs,
        draft_probs=call.draft_probs,
        where=place,
        masses=masses,
        longest=longest,
        vocabulary=vocabulary,
        chunks=chunks,
        BLOCK=_BLOCK,
        num_warps=8,
    )
    final_token_kernel[(batch,)](
        predicts=call.predicts,
        accept_token_num=call.accept_token_num,
        target_probs=call.target_probs,
        draft_probs=call.draft_probs,
        where=place,
        masses=masses,
        uniform=call.uniform_samples_for_final_sampling,
        longest=longest,
        vocabulary=vocabulary,
        chunks=chunks,
        BLOCK=_BLOCK,
        CHUNKS=max(2, gpu.next_power_of_2(chunks)),
        num_warps=8,
    )
