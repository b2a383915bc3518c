"""Context parallelism: partition a micro-batch's rows among ranks, and gather what they compute.

Rows are partitioned in runs, at equal cost. Of four runs, two ranks may have:

    rows     | 0 1 | 2 3 | 4 5 | 6 7 |
    rank 0   | 0 1 |           | 6 7 |
    rank 1         | 2 3 | 4 5 |

On each rank:

    embed, norm, qkv    own rows
    all_gather_kv       keys and values of all rows; backward sums their gradients over the ranks
    attention           own queries against all keys on their paths
    projection, MLP     own rows
    head                log-probs that own rows predict
    gather_logprobs     all log-probs of the micro-batch, from which every rank computes the loss
"""

from __future__ import annotations

from collections.abc import Sequence
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

MAX_RUNS = 16  # of consecutive rows on a rank: more of them balance better, and are shorter


@dataclass(frozen=True, slots=True)
class ContextShard:
    """What this rank of `group` computes of a micro-batch of T rows and U log-probs.

    `batch`: input, positions, attention and head of its own rows. `row_order` [T], `logprob_order`
    [U]: where each row and log-prob is in the concatenation of all ranks' parts. `padded_logprobs`:
    the length to which every rank pads its log-probs.
    """

    batch: TreeBatch
    group: dist.ProcessGroup
    row_order: torch.Tensor
    logprob_order: torch.Tensor
    padded_logprobs: int

    def to(self, device: torch.device) -> ContextShard:
        return replace(
            self,
            batch=self.batch.to(device),
            row_order=self.row_order.to(device),
            logprob_order=self.logprob_order.to(device),
        )

    def all_gather_kv(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather keys and values [T, H, D] of all rows from those of each rank.

        The backward pass sums the gradients of a row over the ranks.
        """
        if dist.get_world_size(self.group) == 1:
            return k, v
        own = torch.cat([k, v], dim=1)
        gathered = gather_from_sequence_parallel_region(
            own, tensor_parallel_output_grad=True, group=self.group
        )
        k, v = gathered.index_select(0, self.row_order).chunk(2, dim=1)
        return k, v

    def gather_logprobs(self, own: LinearLogprob) -> LinearLogprob:
        """Gather all U log-probs (and entropies) from those of each rank.

        Every rank has their whole gradient, and the backward pass keeps that of its own.
        """
        if dist.get_world_size(self.group) == 1:
            return own
        columns = torch.stack([each for each in own if each is not None], dim=1)
        columns = F.pad(columns, (0, 0, 0, self.padded_logprobs - len(columns)))
        gathered = gather_from_sequence_parallel_region(
            columns, tensor_parallel_output_grad=False, group=self.group
        )
        found = gathered.index_select(0, self.logprob_order).unbind(1)
        return LinearLogprob(*found, *[None] * (len(own) - len(found)))


def shard_context(batch: TreeBatch, group: dist.ProcessGroup, head_keys: float) -> ContextShard:
    """Return this rank's shard of `batch`; the size of `group` must divide its number of rows.

    A row costs the keys that it sees, plus `head_keys` (see head_cost_in_keys) for each log-prob
    that it predicts.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    predicting_rows = batch.logit_indices.numpy()
    total = batch.input_ids.shape[1]
    cost = batch.layout.depth + 1 + head_keys * np.bincount(predicting_rows, minlength=total)
    rows_by_rank = partition_rows(cost, ranks)
    owner, position = np.empty(total, np.int64), np.empty(total, np.int64)
    for each, rows in enumerate(rows_by_rank):
        owner[rows], position[rows] = each, np.arange(len(rows))
    logprobs_by_rank = [np.flatnonzero(owner[predicting_rows] == each) for each in range(ranks)]
    width = max(1, *map(len, logprobs_by_rank))
    own_rows = torch.from_numpy(rows_by_rank[rank])
    own_logprobs = logprobs_by_rank[rank]
    own_batch = replace(
        batch,
        input_ids=batch.input_ids[:, own_rows],
        position_ids=batch.position_ids[:, own_rows],
        layout=batch.layout.select_queries(rows_by_rank[rank]),
        logit_indices=torch.from_numpy(position[predicting_rows[own_logprobs]]),
        labels=batch.labels[torch.from_numpy(own_logprobs)],
    )
    row_order = torch.from_numpy(owner * len(own_rows) + position)
    return ContextShard(own_batch, group, row_order, _logprob_order(logprobs_by_rank, width), width)


def _logprob_order(logprobs_by_rank: Sequence[Ints], width: int) -> torch.Tensor:
    """Where each log-prob is in the concatenation of the ranks' log-probs, each padded to `width`."""
    order = np.empty(sum(map(len, logprobs_by_rank)), np.int64)
    for rank, logprobs in enumerate(logprobs_by_rank):
        order[logprobs] = rank * width + np.arange(len(logprobs))
    return torch.from_numpy(order)


def partition_rows(cost: npt.NDArray[np.float64], ranks: int) -> list[Ints]:
    """Partition rows among ranks: equally many for each, in runs of consecutive rows, and of about
    the same cost.

    Proceeds in rounds, each of which gives every rank a run of the same length, the most expensive
    run to the rank with the least cost so far; the most uneven rounds come first. `ranks` must
    divide the number of rows. Rows of a rank are ascending.
    """
    rows_per_rank = len(cost) // ranks
    bounds = np.linspace(0, rows_per_rank, min(MAX_RUNS, rows_per_rank) + 1).astype(int).tolist()
    rounds = [
        np.arange(start * ranks, stop * ranks).reshape(ranks, -1)
        for start, stop in pairwise(bounds)
    ]
    load = np.zeros(ranks)
    runs_by_rank: list[list[Ints]] = [[] for _ in range(ranks)]
    for runs in sorted(rounds, key=lambda runs: -float(np.ptp(cost[runs].sum(1)))):
        costs = cost[runs].sum(1)
        most_expensive, least_loaded = (
            np.argsort(-costs, kind="stable"),
            np.argsort(load, kind="stable"),
        )
        for run, rank in zip(most_expensive, least_loaded, strict=True):
            runs_by_rank[rank].append(runs[run])
            load[rank] += costs[run]
    return [np.sort(np.concatenate(runs)) for runs in runs_by_rank]


def head_cost_in_keys(hf_config: Any) -> float:
    """Return how many keys a query must see in every layer to cost as much as one row of the head."""
    width = (
        hf_config.num_attention_heads * (getattr(hf_config, "head_dim", None) or 0)
        or hf_config.hidden_size
    )
    return hf_config.vocab_size * hf_config.hidden_size / (2 * width * hf_config.num_hidden_layers)


def pad_rows(batch: TreeBatch, multiple: int) -> TreeBatch:
    """Append rows without loss, as a path of their own, until `multiple` divides the number of
    rows.

    Sequence and context parallelism give every rank the same number of rows.
    """
    length = batch.input_ids.shape[1]
    padding = -length % multiple
    if not padding:
        return batch
    depth, subtree_end = batch.layout.depth, batch.layout.subtree_end
    path = np.arange(padding, dtype=depth.dtype)
    zeros = batch.input_ids.new_zeros(1, padding)
    positions = torch.from_numpy(path)[None].to(zeros)
    path_end = np.full(padding, length + padding, dtype=subtree_end.dtype)
    return replace(
        batch,
        input_ids=torch.cat([batch.input_ids, zeros], dim=1),
        position_ids=torch.cat([batch.position_ids, positions], dim=1),
        layout=TreeLayout(
            np.concatenate([depth, path]),
            np.concatenate([subtree_end, path_end]),
            batch.layout.device,
        ),
    )
