"""Context parallelism: which rows of a micro-batch each rank of a group computes, and how the ranks complete it.

Every rank embeds, norms and multiplies its own rows. In the attention it has its own queries and, gathered, all keys
and values: their gradients are summed back to the ranks whose rows they are. The head computes the log-probs that a
rank's rows predict; gathered, they are the micro-batch's, from which every rank takes the same loss.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch.nn import functional as F

from spiral_mega.kernels.logits import LinearLogprob
from spiral_mega.packing.tree import Ints
from spiral_mega.packing.tree_batch import TreeBatch
from spiral_mega.packing.tree_layout import TreeLayout

ROUNDS = 16  # runs of rows that a rank has of a micro-batch: more of them balance better, and are shorter


@dataclass(frozen=True, slots=True)
class Share:
    """What this rank of `group` computes of a micro-batch of T rows and U log-probs.

    `batch`: input, positions, attention and head of its own rows. `row_order` [T], `head_order` [U]: where each stands
    in what the ranks' parts, put one after the other, hold; `head_width`: as how many log-probs every rank's count.
    """

    batch: TreeBatch
    group: dist.ProcessGroup
    row_order: torch.Tensor
    head_order: torch.Tensor
    head_width: int

    def to(self, device: torch.device) -> Share:
        moved = {name: getattr(self, name).to(device) for name in ("batch", "row_order", "head_order")}
        return replace(self, **moved)

    def whole_keys(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [T, H, D] of all rows from those of each rank; gradients of a row are summed over the
        ranks."""
        if dist.get_world_size(self.group) == 1:
            return k, v
        mine = torch.cat([k, v], dim=1)
        every = gather_from_sequence_parallel_region(mine, tensor_parallel_output_grad=True, group=self.group)
        k, v = every.index_select(0, self.row_order).chunk(2, dim=1)
        return k, v

    def whole_head(self, mine: LinearLogprob) -> LinearLogprob:
        """All U log-probs from those of each rank; every rank has their whole gradient, and keeps that of its own."""
        if dist.get_world_size(self.group) == 1:
            return mine
        columns = torch.stack([each for each in mine if each is not None], dim=1)
        columns = F.pad(columns, (0, 0, 0, self.head_width - len(columns)))
        every = gather_from_sequence_parallel_region(columns, tensor_parallel_output_grad=False, group=self.group)
        found = every.index_select(0, self.head_order).unbind(1)
        return LinearLogprob(*found, *[None] * (len(mine) - len(found)))


def share_out(batch: TreeBatch, group: dist.ProcessGroup, head_keys: float) -> Share:
    """This rank's share of `batch`, whose rows the size of `group` divides; see `deal` and `keys_of_a_head`."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    predicted = batch.logit_indices.numpy()
    total = batch.input_ids.shape[1]
    dealt = deal(batch.layout.depth + 1 + head_keys * np.bincount(predicted, minlength=total), ranks)
    owner, place = np.empty(total, np.int64), np.empty(total, np.int64)
    for each, rows in enumerate(dealt):
        owner[rows], place[rows] = each, np.arange(len(rows))
    mine = torch.from_numpy(dealt[rank])
    heads = [np.flatnonzero(owner[predicted] == each) for each in range(ranks)]
    width = max(1, *map(len, heads))
    head_order = np.empty(len(predicted), np.int64)
    for each, found in enumerate(heads):
        head_order[found] = each * width + np.arange(len(found))
    own = replace(
        batch,
        input_ids=batch.input_ids[:, mine],
        position_ids=batch.position_ids[:, mine],
        layout=batch.layout.select_queries(dealt[rank]),
        logit_indices=torch.from_numpy(place[predicted[heads[rank]]]),
        labels=batch.labels[torch.from_numpy(heads[rank])],
    )
    row_order = torch.from_numpy(owner * len(mine) + place)
    return Share(own, group, row_order, torch.from_numpy(head_order), width)


def deal(cost: npt.NDArray[np.float64], ranks: int) -> list[Ints]:
    """Rows for each rank, ascending: as many for each, in runs of consecutive rows, and of about the same cost.

    In rounds, each of which gives every rank a run of one length, the dearest to the rank that has the least so far;
    the most uneven rounds first. `ranks` must divide the number of rows.
    """
    each = len(cost) // ranks
    bounds = np.linspace(0, each, min(ROUNDS, each) + 1).astype(int).tolist()
    rounds = [np.arange(start * ranks, stop * ranks).reshape(ranks, -1) for start, stop in pairwise(bounds)]
    load = np.zeros(ranks)
    dealt: list[list[Ints]] = [[] for _ in range(ranks)]
    for runs in sorted(rounds, key=lambda runs: -float(np.ptp(cost[runs].sum(1)))):
        costs = cost[runs].sum(1)
        for run, rank in zip(np.argsort(-costs, kind="stable"), np.argsort(load, kind="stable"), strict=True):
            dealt[rank].append(runs[run])
            load[rank] += costs[run]
    return [np.sort(np.concatenate(runs)) for runs in dealt]


def keys_of_a_head(hf_config: Any) -> float:
    """How many keys a query must see in every layer to cost as much as one row of the head."""
    width = hf_config.num_attention_heads * (getattr(hf_config, "head_dim", None) or 0) or hf_config.hidden_size
    return hf_config.vocab_size * hf_config.hidden_size / (2 * width * hf_config.num_hidden_layers)


def pad_rows(batch: TreeBatch, multiple: int) -> TreeBatch:
    """With rows of no loss after the last, as a path of their own, so that `multiple` divides their number: sequence
    and context parallelism give every rank as many."""
    length = batch.input_ids.shape[1]
    if not (more := -length % multiple):
        return batch
    depth, subtree_end = batch.layout.depth, batch.layout.subtree_end
    path = np.arange(more, dtype=depth.dtype)
    zeros = batch.input_ids.new_zeros(1, more)
    return replace(
        batch,
        input_ids=torch.cat([batch.input_ids, zeros], dim=1),
        position_ids=torch.cat([batch.position_ids, torch.from_numpy(path)[None].to(zeros)], dim=1),
        layout=TreeLayout(
            np.concatenate([depth, path]),
            np.concatenate([subtree_end, np.full(more, length + more, dtype=subtree_end.dtype)]),
            batch.layout.device,
        ),
    )
