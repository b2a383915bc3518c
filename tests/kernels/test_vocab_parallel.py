"""A vocabulary sharded over 2 and 4 ranks gives the results of the whole one, forward and backward."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from tests.kernels.cases import OUTPUTS, Case, assert_accurate, rms_errors, truth
from tests.kernels.vocab_parallel_jobs import SHARDED
from tests.support.ranks import run_ranks

WORLDS = (2, 4)
CASES = {
    "ragged": Case(77, 33, 1001, bias=True),
    "adapter, softcap, temperature": Case(
        40, 32, 403, scale=9.0, softcap=6.0, temperature=0.8, rank=4
    ),
    "huge logits, banned entries": Case(33, 64, 500, scale=1e4, banned=300),
    "idle rows": Case(64, 24, 257, idle=0.75),
    "all rows idle": Case(9, 40, 333, idle=1.0),
    "no tokens": Case(0, 16, 100),
    "fewer entries than ranks": Case(20, 16, 3),
    "bfloat16": Case(64, 128, 1003, dtype=torch.bfloat16),
}
UNEVEN = replace(CASES["ragged"], T=50)


@cache
def results(world_size: int) -> list[dict[str, Any]]:
    cases: dict[str, Any] = {name: (case, case.tensors(), None) for name, case in CASES.items()}
    sizes = [UNEVEN.V - 10 * (world_size - 1) - 7, 7, *[10] * (world_size - 2)]
    sizes[-1] += UNEVEN.V - sum(sizes)
    cases["uneven shards"] = UNEVEN, UNEVEN.tensors(), sizes
    return run_ranks(world_size, "tests.kernels.vocab_parallel_jobs:run_cases", cases)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("name", [*CASES, "uneven shards"])
def test_shards_give_what_the_whole_vocabulary_gives(name: str, world_size: int) -> None:
    case = CASES.get(name, UNEVEN)
    expected = truth(case.tensors(), case)
    ranks = [rank[name] for rank in results(world_size)]
    for rank in ranks:
        together = {
            key: torch.cat([each["found"][key] for each in ranks])
            for key in SHARDED
            if key in expected
        }
        found = rank["found"] | together
        if case.dtype == torch.float32 and case.scale < 100:
            assert_accurate(found, expected)
        else:
            naive = rms_errors(truth(case.tensors(), case, None), expected)
            ours = rms_errors(found, expected)
            assert all(ours[key] <= 1.2 * naive[key] + 1e-6 for key in expected), (ours, naive)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("name", CASES)
def test_every_rank_has_the_same_bits_of_what_it_shares(name: str, world_size: int) -> None:
    first, *others = [rank[name]["found"] for rank in results(world_size)]
    for other in others:
        for key in (*OUTPUTS, "hidden"):
            torch.testing.assert_close(other[key], first[key], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("name", CASES)
def test_padding_gets_no_gradient(name: str, world_size: int) -> None:
    padding = [rank[name]["padding"]["weight"] for rank in results(world_size)]
    assert sum(map(len, padding)) >= 5 * world_size
    assert not any(each.any() for each in padding)


@pytest.mark.parametrize("world_size", WORLDS)
def test_four_numbers_a_token_travel_forward_and_the_hidden_gradient_back(world_size: int) -> None:
    case = CASES["ragged"]
    for rank in results(world_size):
        assert rank["ragged"]["exchanged"] == [2 * case.T, 2 * case.T, case.T * case.H]
