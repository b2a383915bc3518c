"""Rows are partitioned among context-parallel ranks in equal numbers and at equal cost, each to one rank."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spiral_mega.packing.training_sequence import SequenceKey, TrainingSequence
from spiral_mega.packing.tree_batch import pack
from spiral_mega.policy.megatron.context_parallel import head_cost_in_keys, partition_rows
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.megatron


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40), st.integers(1, 5))
def test_every_row_has_one_rank_and_every_rank_as_many(costs: list[float], ranks: int) -> None:
    cost = np.repeat(costs, ranks)
    rows_by_rank = partition_rows(cost, ranks)
    assert sorted(np.concatenate(rows_by_rank).tolist()) == list(range(len(cost)))
    for rows in rows_by_rank:
        assert len(rows) == len(costs)
        assert all(np.diff(rows) > 0)
    assert [rows.tolist() for rows in partition_rows(cost, ranks)] == [
        rows.tolist() for rows in rows_by_rank
    ]


def spiral_problem(length: int) -> list[TrainingSequence]:
    """Eight search traces, and four sets of four of them with four aggregation traces each."""
    rng = random.Random(0)

    def ids(count: int) -> list[int]:
        return [rng.randrange(1000) for _ in range(count)]

    prompt, traces = ids(50), [ids(rng.randint(length // 2, length)) for _ in range(8)]
    sequences = [(prompt, trace) for trace in traces]
    for _ in range(4):
        context = prompt + [token for i in sorted(rng.sample(range(8), 4)) for token in traces[i]]
        sequences += [(context, ids(rng.randint(length // 2, length))) for _ in range(4)]
    return [
        TrainingSequence(SequenceKey(0, i), p, r, [0.0] * len(r), 1.0, 1.0)
        for i, (p, r) in enumerate(sequences)
    ]


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("shape", ["tree", "flat", "one sequence"])
def test_ranks_have_the_same_to_do(shape: str, ranks: int) -> None:
    sequences = spiral_problem(256)
    if shape == "flat":
        sequences = [
            TrainingSequence(SequenceKey(i, 0), *s_fields(s)) for i, s in enumerate(sequences)
        ]
    elif shape == "one sequence":
        sequences = [
            TrainingSequence(SequenceKey(0, 0), [1] * 4096, [2] * 4096, [0.0] * 4096, 1.0, 1.0)
        ]
    batch = pack(sequences)
    rows = len(batch.layout.depth) // ranks * ranks
    head = np.bincount(batch.logit_indices.numpy(), minlength=rows)[:rows]
    attention = batch.layout.depth[:rows] + 1  # a row sees its path
    weight = attention.sum() / head.sum()  # as expensive as all of the attention
    for cost in (attention, attention + weight * head):
        loads = [cost[mine].sum() for mine in partition_rows(cost, ranks)]
        assert max(loads) < 1.02 * sum(loads) / ranks
    if shape == "one sequence":  # what the partition is for
        in_a_row = [part.sum() for part in np.split(attention, ranks)]
        assert max(in_a_row) > 1.4 * sum(in_a_row) / ranks


def s_fields(sequence: TrainingSequence) -> tuple[list[int], list[int], list[float], float, float]:
    return sequence.prompt_ids, sequence.response_ids, sequence.sampler_logprobs, 1.0, 1.0


def test_a_row_of_the_head_is_worth_its_products_in_keys() -> None:
    config = tiny_model("qwen3", tied=True).config  # 2 layers, 2 heads of 32
    of_a_key = 2 * (2 * 2 * 2 * 32)  # in each layer a product with the key, and one with the value
    assert head_cost_in_keys(config) == 2 * config.vocab_size * config.hidden_size / of_a_key
