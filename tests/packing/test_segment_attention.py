"""Packed attention is plain causal attention of each segment by itself."""

import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import eager_attention_forward

from spiral_mega.packing.flat import pack
from spiral_mega.packing.segment_attention import segment_sdpa
from spiral_mega.packing.sequences import Sequence
from tests.support.tiny_models import VOCAB, Family, tiny_model

LENGTHS = {
    "one segment": [17],
    "one token": [1],
    "ragged": [5, 1, 23, 8, 9, 1, 2],
    "equal": [6, 6, 6],
    "many": [1 + (7 * i) % 13 for i in range(60)],
    "falling by halves": [32, 16, 8, 4, 2, 1],
}
HEADS = {"multi-head": (2, 2), "grouped": (4, 2), "one key head": (4, 1)}
SCALING = 0.3  # not the default 1 / sqrt(D)


def projections(lengths: list[int], heads: tuple[int, int], dtype: torch.dtype) -> list[torch.Tensor]:
    """Query [1, Hq, T, 8], key and value [1, Hkv, T, 8]."""
    torch.manual_seed(sum(lengths))
    return [torch.randn(1, h, sum(lengths), 8, dtype=dtype, requires_grad=True) for h in (heads[0], heads[1], heads[1])]


def bounds(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def attend_packed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    module = torch.nn.Module()
    output, weights = segment_sdpa(module, query, key, value, None, cu_seq_lens_q=bounds(lengths), scaling=SCALING)
    assert weights is None
    return output


def attend_by_definition(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """softmax(scaling * q k) v of every query over the keys up to its own, written out; [1, T, Hq, D]."""
    _, heads, length, dim = query.shape
    output = torch.empty(1, length, heads, dim, dtype=query.dtype)
    for head in range(heads):
        of = head // (heads // key.shape[1])
        for t in range(length):
            scores = (key[0, of, : t + 1] @ query[0, head, t]) * SCALING
            weights = (scores - scores.max()).exp()
            output[0, t, head] = (weights / weights.sum()) @ value[0, of, : t + 1]
    return output


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_each_segment_is_attended_to_as_by_definition_forward_and_backward(
    lengths: list[int], heads: tuple[int, int]
) -> None:
    inputs = projections(lengths, heads, torch.float64)
    segments = zip(*(tensor.split(lengths, dim=2) for tensor in inputs), strict=True)
    expected = torch.cat([attend_by_definition(*segment) for segment in segments], dim=1)
    found = attend_packed(*inputs, lengths)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    upstream = torch.randn_like(expected)
    for ours, theirs in zip(
        torch.autograd.grad(found, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_agrees_with_the_eager_attention_of_transformers() -> None:
    lengths, heads = LENGTHS["ragged"], HEADS["grouped"]
    inputs = projections(lengths, heads, torch.float32)
    module: Any = SimpleNamespace(num_key_value_groups=heads[0] // heads[1], training=False)
    outputs = []
    for query, key, value in zip(*(tensor.split(lengths, dim=2) for tensor in inputs), strict=True):
        mask = torch.full((query.shape[2], query.shape[2]), -math.inf).triu(1)[None, None]
        outputs.append(eager_attention_forward(module, query, key, value, mask, scaling=SCALING)[0])
    torch.testing.assert_close(attend_packed(*inputs, lengths), torch.cat(outputs, dim=1), rtol=0, atol=1e-6)


def test_no_value_of_one_segment_reaches_another() -> None:
    lengths = LENGTHS["ragged"]
    clean = projections(lengths, HEADS["grouped"], torch.float64)
    expected = attend_packed(*clean, lengths)
    for start, stop in pairwise(bounds(lengths).tolist()):
        # Not even NaN, which any weight but an exact absence would spread.
        spoilt = [tensor.detach().clone() for tensor in clean]
        for tensor in spoilt:
            tensor[:, :, start:stop] = math.nan
        found = attend_packed(*spoilt, lengths)
        assert found[:, start:stop].isnan().all()
        others = torch.ones(sum(lengths), dtype=torch.bool)
        others[start:stop] = False
        assert torch.equal(found[:, others], expected[:, others])


@pytest.mark.parametrize("window", [4, 22])
def test_a_sliding_window_shorter_than_a_segment_is_refused(window: int) -> None:
    with pytest.raises(ValueError, match=rf"no sliding window, and a sequence of 23 is over {window}"):
        attend(sliding_window=window)


def test_a_sliding_window_that_reaches_over_every_segment_changes_nothing() -> None:
    assert torch.equal(attend(sliding_window=23), attend())


@pytest.mark.parametrize(
    "argument",
    [{"dropout": 0.1}, {"softcap": 30.0}, {"s_aux": torch.zeros(4)}, {"attention_mask": torch.zeros(1, 1, 49, 49)}],
    ids=lambda argument: next(iter(argument)),
)
def test_what_it_does_not_compute_is_refused(argument: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="plain causal attention"):
        attend(**argument)


def attend(attention_mask: torch.Tensor | None = None, **arguments: Any) -> torch.Tensor:
    lengths = LENGTHS["ragged"]
    inputs = projections(lengths, HEADS["grouped"], torch.float32)
    module = torch.nn.Module()
    return segment_sdpa(module, *inputs, attention_mask, cu_seq_lens_q=bounds(lengths), **arguments)[0]


def logits_packed(model: torch.nn.Module, token_lists: list[list[int]]) -> list[torch.Tensor]:
    """The model's logits at every token of every sequence, all in one row as the policy has them."""
    batch = pack([Sequence((0, 0), t[:1], t[1:], [0.0] * (len(t) - 1), 0.0, 0.0) for t in token_lists])
    output = model(
        input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, **batch.attention_kwargs()
    )
    return list(output.logits[0].split([len(tokens) for tokens in token_lists]))


def token_lists(seed: int = 0) -> list[list[int]]:
    torch.manual_seed(seed)
    return [torch.randint(0, VOCAB, (length,)).tolist() for length in (7, 1, 19, 4, 12)]


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_packed_model_sees_each_sequence_as_if_alone(family: Family) -> None:
    model, plain = tiny_model(family, tied=False), tiny_model(family, tied=False)
    model.set_attn_implementation("segment_sdpa")
    plain.set_attn_implementation("eager")
    for tokens, found in zip(token_lists(), logits_packed(model, token_lists()), strict=True):
        torch.testing.assert_close(found, plain(input_ids=torch.tensor([tokens])).logits[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_another_token_in_one_sequence_changes_no_other(family: Family) -> None:
    model = tiny_model(family, tied=False)
    model.set_attn_implementation("segment_sdpa")
    clean = logits_packed(model, token_lists())
    for changed in range(5):
        lists = token_lists()
        lists[changed][0] = (lists[changed][0] + 1) % VOCAB
        for i, found in enumerate(logits_packed(model, lists)):
            assert torch.equal(found, clean[i]) == (i != changed)
