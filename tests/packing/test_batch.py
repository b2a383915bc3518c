"""A micro-batch computes each distinct response token once, and every trace reads its own."""

import pytest
import torch
from hypothesis import given

from spiral_mega.packing.training_sequence import SequenceKey, TrainingSequence
from spiral_mega.packing.tree_batch import pack
from tests.packing.random_trees import make, sequence_lists, tokens_of

FIRST = TrainingSequence(
    SequenceKey(0, 0), [5, 6], [8, 9], [-0.1, -0.2], advantage=1.5, weight=0.25
)
SECOND = TrainingSequence(
    SequenceKey(0, 1), [5, 6], [7], [float("nan")], advantage=-1.0, weight=0.5
)
THIRD = TrainingSequence(SequenceKey(0, 2), [5, 6], [8], [-0.4], advantage=2.0, weight=1.0)


def test_every_field_as_written_by_hand() -> None:
    batch = pack([FIRST, SECOND, THIRD])
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 2, 3]]
    # Row 1 predicts both 7 and 8; the 8 is computed once and read by the first and the third sequence.
    assert batch.logit_indices.tolist() == [1, 1, 3]
    assert batch.labels.tolist() == [7, 8, 9]
    assert batch.gather_indices.tolist() == [1, 2, 0, 1]
    torch.testing.assert_close(
        batch.sampler_logprobs, torch.tensor([-0.1, -0.2, float("nan"), -0.4]), equal_nan=True
    )
    assert batch.advantages.tolist() == [1.5, 1.5, -1.0, 2.0]
    assert batch.weights.tolist() == [0.25, 0.25, 0.5, 1.0]
    assert batch.sequence_ids.tolist() == [0, 0, 1, 2]
    assert batch.attention_kwargs() == {"tree": batch.layout}


@given(sequence_lists())
def test_no_pair_of_node_and_target_is_computed_twice(sequences: list[TrainingSequence]) -> None:
    batch = pack(sequences)
    pairs = list(zip(batch.logit_indices.tolist(), batch.labels.tolist(), strict=True))
    distinct = {
        (s.key.prompt_index, tokens_of(s)[: n + 1])
        for s in sequences
        for n in range(len(s.prompt_ids), s.num_tokens)
    }
    assert len(set(pairs)) == len(pairs) == len(distinct)
    assert batch.labels[batch.gather_indices].tolist() == [
        token for s in sequences for token in s.response_ids
    ]
    assert batch.input_ids[0, batch.logit_indices[batch.gather_indices]].tolist() == [
        tokens_of(s)[n - 1] for s in sequences for n in range(len(s.prompt_ids), s.num_tokens)
    ]


def test_nothing_to_pack_is_one_token_without_a_loss() -> None:
    batch = pack([])
    assert batch.input_ids.shape == batch.position_ids.shape == (1, 1)
    for name in ("logit_indices", "labels", "gather_indices", "sequence_ids"):
        assert getattr(batch, name).shape == (0,)
        assert getattr(batch, name).dtype == torch.int64
    for name in ("sampler_logprobs", "advantages", "weights"):
        assert getattr(batch, name).shape == (0,)


def test_moving_to_a_device_moves_every_tensor() -> None:
    moved = pack([FIRST, THIRD]).to(torch.device("meta"))
    for name in type(moved).__dataclass_fields__:
        value = getattr(moved, name)
        assert value.device == torch.device("meta"), name
    assert moved.layout.blocks()[0].cu_q.is_meta


def test_as_many_logprobs_as_response_tokens_or_it_is_refused() -> None:
    with pytest.raises(ValueError, match="2 response tokens and 1 sampler log-probs"):
        pack([TrainingSequence(SequenceKey(0, 0), [11], [21, 22], [-0.1], 1.0, 1.0)])


def test_a_sequence_without_a_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="empty prompt"):
        pack([FIRST, make(0, 7, [], [1])])
