"""Exchange sequences between ranks, so that each holds the micro-batches that its replica trains
on.

1. gather       the keys of all sequences; the rank that holds a prompt's first sequence owns the prompt
2. all-to-all   each sequence to its prompt's owner
3. gather       the branches of the owners' trees, lengths only; every rank computes the same assignment
4. all-to-all   each sequence to the ranks of the replica that it is assigned to
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from spiral_mega.distributed.collectives import all_to_all_objects, gather_objects
from spiral_mega.packing.microbatches import assign_microbatches, select_assigned
from spiral_mega.packing.training_sequence import SequenceKey, TrainingSequence, group_by_prompt
from spiral_mega.packing.tree_parts import Branch, make_branches


def distribute(
    local: list[TrainingSequence], budget: int, replica: int
) -> list[list[TrainingSequence]]:
    """Exchange the ranks' `local` sequences and return the micro-batches of this rank's replica;
    collective.

    `replica`: the index of the copy of the model that this rank is part of; all its ranks get the
    same. The result depends on the sequences and on the number of replicas, not on which rank
    sampled what.
    """
    replicas = gather_objects(replica)
    owned = _send_to_owners(local)
    assignment = assign_microbatches(_gather_trees(owned), budget, len(set(replicas)))
    received = _send_to_replicas(owned, assignment, replicas)
    return select_assigned(received, assignment[replica])


def _send_to_owners(local: Sequence[TrainingSequence]) -> list[TrainingSequence]:
    """Send each sequence to the owner of its prompt; return those of the prompts that this rank owns."""
    owners = _find_owners(gather_objects([sequence.key for sequence in local]))
    outgoing: list[list[TrainingSequence]] = [[] for _ in range(dist.get_world_size())]
    for sequence in local:
        outgoing[owners[sequence.key.prompt_index]].append(sequence)
    return all_to_all_objects(outgoing)


def _find_owners(keys_by_rank: Sequence[Sequence[SequenceKey]]) -> dict[int, int]:
    """Return by prompt index the rank that holds the prompt's first sequence."""
    holders = [(key, rank) for rank, keys in enumerate(keys_by_rank) for key in keys]
    owners: dict[int, int] = {}
    for key, rank in sorted(holders):
        owners.setdefault(key.prompt_index, rank)
    return owners


def _gather_trees(owned: Sequence[TrainingSequence]) -> list[list[Branch]]:
    """Gather the trees of all prompts, in order of their first keys, the same on every rank."""
    groups = group_by_prompt(sorted(owned, key=lambda sequence: sequence.key))
    by_rank = gather_objects([make_branches(group) for group in groups])
    trees = [tree for trees_of_rank in by_rank for tree in trees_of_rank]
    return sorted(trees, key=_first_key)


def _first_key(tree: Sequence[Branch]) -> SequenceKey:
    return min(branch.key for branch in tree)


def _send_to_replicas(
    owned: Sequence[TrainingSequence],
    assignment: Sequence[Sequence[Sequence[SequenceKey]]],
    replicas: Sequence[int],
) -> list[TrainingSequence]:
    """Send each owned sequence to every rank of the replica it is assigned to; return what this rank receives."""
    by_key = {sequence.key: sequence for sequence in owned}
    outgoing = []
    for replica in replicas:
        keys = [key for microbatch in assignment[replica] for key in microbatch]
        outgoing.append([by_key[key] for key in keys if key in by_key])
    return all_to_all_objects(outgoing)
