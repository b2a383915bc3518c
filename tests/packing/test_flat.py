"""The layout of a micro-batch, token by token."""

import pytest
import torch

from spiral_mega.packing.flat import pack
from spiral_mega.packing.sequences import Sequence

FIRST = Sequence((0, 0), [11, 12, 13], [21, 22], [-0.1, -0.2], advantage=1.5, weight=0.25)
SECOND = Sequence((0, 1), [14], [23], [-0.3], advantage=-1.0, weight=0.5)
THIRD = Sequence((4, 0), [15, 16], [24, 25, 26], [-0.4, float("nan"), -0.6], advantage=2.0, weight=1.0)


def test_every_field_as_written_by_hand() -> None:
    batch = pack([FIRST, SECOND, THIRD])
    assert batch.input_ids.tolist() == [[11, 12, 13, 21, 22, 14, 23, 15, 16, 24, 25, 26]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 3, 4]]
    assert batch.cu_seqlens.tolist() == [0, 5, 7, 12]
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.max_length == 5
    assert batch.rows.tolist() == [2, 3, 5, 8, 9, 10]
    assert batch.targets.tolist() == [21, 22, 23, 24, 25, 26]
    torch.testing.assert_close(
        batch.sampler_logprobs, torch.tensor([-0.1, -0.2, -0.3, -0.4, float("nan"), -0.6]), equal_nan=True
    )
    assert batch.advantages.tolist() == [1.5, 1.5, -1.0, 2.0, 2.0, 2.0]
    assert batch.weights.tolist() == [0.25, 0.25, 0.5, 1.0, 1.0, 1.0]
    assert batch.sequence_ids.tolist() == [0, 0, 1, 2, 2, 2]


def test_attention_is_told_the_bounds_under_the_names_of_transformers() -> None:
    given = pack([FIRST, SECOND]).attention_kwargs()
    assert {name: torch.as_tensor(value).tolist() for name, value in given.items()} == {
        "cu_seq_lens_q": [0, 5, 7],
        "cu_seq_lens_k": [0, 5, 7],
        "max_length_q": 5,
        "max_length_k": 5,
    }


def test_nothing_to_pack_is_one_token_without_a_loss() -> None:
    batch = pack([])
    assert batch.input_ids.shape == batch.position_ids.shape == (1, 1)
    assert batch.cu_seqlens.tolist() == [0, 1]
    assert batch.max_length == 1
    for name in ("rows", "targets", "sampler_logprobs", "advantages", "weights", "sequence_ids"):
        assert getattr(batch, name).shape == (0,)
    assert batch.rows.dtype == batch.targets.dtype == batch.sequence_ids.dtype == torch.int64


def test_moving_to_a_device_moves_every_tensor_and_keeps_the_rest() -> None:
    moved = pack([FIRST, THIRD]).to(torch.device("meta"))
    assert moved.max_length == 5
    for name in type(moved).__dataclass_fields__:
        value = getattr(moved, name)
        assert isinstance(value, int) or value.is_meta, name


def test_a_sequence_without_a_prompt_is_refused() -> None:
    # Its first token would be predicted from the sequence before it.
    with pytest.raises(ValueError, match="empty prompt"):
        pack([FIRST, Sequence((0, 0), [], [21], [-0.1], 1.0, 1.0)])


def test_as_many_logprobs_as_response_tokens_or_it_is_refused() -> None:
    with pytest.raises(ValueError, match="2 response tokens and 1 sampler log-probs"):
        pack([Sequence((0, 0), [11], [21, 22], [-0.1], 1.0, 1.0)])
