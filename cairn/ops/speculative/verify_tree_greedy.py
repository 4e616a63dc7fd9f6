"""Acceptance of drafted tokens under greedy decoding."""

from __future__ import annotations

from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import INDICES, expect
from cairn.ops.registry import op
from cairn.ops.speculative.kernels import greedy_kernel
from cairn.ops.speculative.trees import (
    ALIASES,
    expect_links,
    expect_outcome,
    expect_tree,
)


@op(mutates=("predicts", "accept_index", "accept_token_num"), aliases=ALIASES)
def verify_tree_greedy(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Walk every tree from node 0, always to the first child that holds the target's prediction.

    The walk ends where no child does, or with S - 1 drafted tokens accepted; where links run in a
    circle, after n - 1 visited links, the most a tree has.

    As keywords, names that begin with retrive_ may also begin with retrieve_.

    Args:
        predicts: [B * n] or longer, int32, written at every visited node: the target's next token.
        accept_index: [B, S] int32, written from the left: numbers of the visited nodes. Elements
            after them are not written.
        accept_token_num: [B] int32, written: drafted tokens accepted.
        candidates: [B, n] int64 or int32, token of every node.
        retrive_index, retrive_next_token, retrive_next_sibling: [B, n] int64, the trees.
        target_predict: [B, n] int64 or int32, the target's next token after every node.
    Raises:
        BadArgument: for another shape, dtype or device; on the CPU for links out of range.
    """
    tree = (retrive_index, retrive_next_token, retrive_next_sibling)
    expect_links("verify_tree_greedy", *tree)
    rows = zip(
        *(x.tolist() for x in tree),
        candidates.tolist(),
        strict=True,
    )
    wanted = target_predict.flatten().tolist()
    for row, (index, next_token, next_sibling, tokens) in enumerate(rows):
        path, child, looks = [index[0]], next_token[0], 1
        while child >= 0 and looks < len(tokens) and len(path) < accept_index.shape[1]:
            looks += 1
            if tokens[child] == wanted[path[-1]]:
                path.append(index[child])
                child = next_token[child]
            else:
                child = next_sibling[child]
        for place, node in enumerate(path):
            predicts[node] = wanted[node]
            accept_index[row, place] = node
        accept_token_num[row] = len(path) - 1


@verify_tree_greedy.check
def _(call: Call) -> None:
    name = "verify_tree_greedy"
    expect_outcome(name, call.predicts, call.accept_index, call.accept_token_num, call.candidates)
    expect_tree(
        name,
        call.retrive_index,
        call.retrive_next_token,
        call.retrive_next_sibling,
        call.candidates.shape,
    )
    expect(name, "retrive_index", call.retrive_index, like=call.candidates)
    shape = call.candidates.shape
    expect(name, "target_predict", call.target_predict, shape, INDICES, call.candidates, dense=-1)


@verify_tree_greedy.implementation("triton", devices=gpu.DEVICES, replayed=True)
def _(call: Call) -> None:
    batch, nodes = call.candidates.shape
    if batch:
        greedy_kernel[(batch,)](
            predicts=call.predicts,
            accept_index=call.accept_index,
            accept_token_num=call.accept_token_num,
            candidates=call.candidates,
            retrive_index=call.retrive_index,
            retrive_next_token=call.retrive_next_token,
            retrive_next_sibling=call.retrive_next_sibling,
            target_predict=call.target_predict,
            nodes=nodes,
            longest=call.accept_index.shape[1],
            num_warps=1,
        )
