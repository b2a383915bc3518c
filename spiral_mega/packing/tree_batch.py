"""One micro-batch: a forest of token trees, the nodes whose log-prob is needed, and who reads it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import compress

import torch

from spiral_mega.packing.training_sequence import TrainingSequence
from spiral_mega.packing.tree import build_tree
from spiral_mega.packing.tree_layout import TreeLayout


@dataclass(frozen=True, slots=True)
class TreeBatch:
    """T distinct tokens; U of them are response tokens, which R (trace, position) pairs learn from.

    `input_ids`, `position_ids` [1, T]; `layout`: who sees whom; `rows` [U]: where each distinct response token is
    predicted (its parent; a node with several children predicts each of them); `targets` [U]; `reads` [R]: which of the
    U a pair reads; `sampler_logprobs`, `advantages`, `weights`, `sequence_ids` [R], sequence by sequence as given.
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
        return replace(self, **{field.name: getattr(self, field.name).to(device) for field in fields(self)})

    def attention_kwargs(self) -> dict[str, TreeLayout]:
        """What tree attention needs, under the name that it takes from the model's arguments."""
        return {"tree": self.layout}


def pack(sequences: list[TrainingSequence]) -> TreeBatch:
    """Merge and lay out. Without sequences, a single token with no loss, so that a rank can keep step.

    Raises ValueError for a sequence without a prompt, or whose tokens and log-probs do not match.
    """
    for s in sequences:
        if len(s.response_ids) != len(s.sampler_logprobs):
            raise ValueError(
                f"sequence {s.key} has {len(s.response_ids)} response tokens and {len(s.sampler_logprobs)} "
                "sampler log-probs"
            )
    tree = build_tree(sequences or [TrainingSequence((0, 0), [0], [], [], 0.0, 0.0)])
    token_ids, parent, nodes = map(torch.from_numpy, (tree.token_ids, tree.parent, tree.response_nodes))
    written = [s.loss_mask() for s in sequences]
    nodes = nodes[torch.tensor([kept for mask in written for kept in mask], dtype=torch.bool)]
    needed = torch.zeros(tree.num_tokens, dtype=torch.bool)
    needed[nodes] = True
    responses = torch.tensor([sum(mask) for mask in written], dtype=torch.long)
    logprobs = [p for s, mask in zip(sequences, written, strict=True) for p in compress(s.sampler_logprobs, mask)]
    return TreeBatch(
        input_ids=token_ids[None],
        position_ids=torch.from_numpy(tree.depth)[None],
        layout=TreeLayout(tree.depth, tree.subtree_end),
        logit_indices=parent[needed],
        labels=token_ids[needed],
        gather_indices=(needed.cumsum(0) - 1)[nodes],
        sampler_logprobs=torch.tensor(logprobs, dtype=torch.float32),
        advantages=torch.tensor([s.advantage for s in sequences], dtype=torch.float32).repeat_interleave(responses),
        weights=torch.tensor([s.weight for s in sequences], dtype=torch.float32).repeat_interleave(responses),
        sequence_ids=torch.arange(len(sequences)).repeat_interleave(responses),
    )
