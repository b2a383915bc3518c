"""Pack a micro-batch: a forest of token trees, the rows that the head predicts from, and who reads
each log-prob.

row                  0  1  2  3  4  5     T = 6 rows go through the model (the tree of packing/tree.py)
token                a  b  c  d  e  f

labels [U]           c  d  e  f           U = 4 rows go through the head: each distinct response token is predicted
logit_indices [U]    1  2  2  1           once, from its parent; a row with two children predicts both

gather_indices [R]   0  1 | 0  2 | 3      R = 5 response tokens, of the sequences (c d), (c e) and (f), read the U
                                          log-probs; the gradients of those that read one log-prob add up
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import compress

import torch

from spiral_mega.packing.training_sequence import SequenceKey, TrainingSequence
from spiral_mega.packing.tree import build_tree
from spiral_mega.packing.tree_layout import TreeLayout


@dataclass(frozen=True, slots=True)
class TreeBatch:
    """T distinct tokens, of which U are response tokens; R response tokens of the sequences learn
    from those.

    - `input_ids`, `position_ids` [1, T]
    - `layout`: which row attends to which
    - `logit_indices` [U]: the row that predicts each distinct response token, its parent; `labels`
      [U]: that token
    - `gather_indices` [R]: which of the U tokens each response token is
    - `sampler_logprobs`, `advantages`, `weights`, `sequence_ids` [R]: sequence by sequence in the
      order given
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    layout: TreeLayout
    logit_indices: torch.Tensor
    labels: torch.Tensor
    gather_indices: torch.Tensor
    sampler_logprobs: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    sequence_ids: torch.Tensor

    def to(self, device: torch.device) -> TreeBatch:
        return replace(
            self, **{field.name: getattr(self, field.name).to(device) for field in fields(self)}
        )

    def attention_kwargs(self) -> dict[str, TreeLayout]:
        """Return what tree attention needs, by the keyword that it reads from the model's arguments."""
        return {"tree": self.layout}


def pack(sequences: list[TrainingSequence]) -> TreeBatch:
    """Merge sequences and lay them out; observations are context, not response tokens.

    Without sequences the batch is a single token with no loss, so that a rank joins every
    collective. Raises ValueError for a sequence without a prompt, or whose tokens and log-probs
    differ in number.
    """
    _check_logprobs(sequences)
    tree = build_tree(sequences or [TrainingSequence(SequenceKey(0, 0), [0], [], [], 0.0, 0.0)])
    token_ids_T, parent_T, nodes = map(
        torch.from_numpy, (tree.token_ids, tree.parent, tree.response_nodes)
    )
    masks = [sequence.loss_mask() for sequence in sequences]
    nodes_R = nodes[torch.tensor([written for mask in masks for written in mask], dtype=torch.bool)]
    predicted_T = torch.zeros(tree.num_tokens, dtype=torch.bool)
    predicted_T[nodes_R] = True
    sampler_logprobs: list[float] = []
    for sequence, mask in zip(sequences, masks, strict=True):
        sampler_logprobs += compress(sequence.sampler_logprobs, mask)
    lengths = torch.tensor([sum(mask) for mask in masks], dtype=torch.long)
    advantages = torch.tensor([sequence.advantage for sequence in sequences], dtype=torch.float32)
    weights = torch.tensor([sequence.weight for sequence in sequences], dtype=torch.float32)
    return TreeBatch(
        input_ids=token_ids_T[None],
        position_ids=torch.from_numpy(tree.depth)[None],
        layout=TreeLayout(tree.depth, tree.subtree_end),
        logit_indices=parent_T[predicted_T],
        labels=token_ids_T[predicted_T],
        gather_indices=(predicted_T.cumsum(0) - 1)[nodes_R],
        sampler_logprobs=torch.tensor(sampler_logprobs, dtype=torch.float32),
        advantages=advantages.repeat_interleave(lengths),
        weights=weights.repeat_interleave(lengths),
        sequence_ids=torch.arange(len(sequences)).repeat_interleave(lengths),
    )


def _check_logprobs(sequences: list[TrainingSequence]) -> None:
    for sequence in sequences:
        tokens, logprobs = len(sequence.response_ids), len(sequence.sampler_logprobs)
        if tokens != logprobs:
            raise ValueError(
                f"sequence {tuple(sequence.key)} has {tokens} response tokens and {logprobs} "
                "sampler log-probs"
            )
