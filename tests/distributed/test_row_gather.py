"""Whole tensors gathered from row shards equal torch's own full tensors."""

from typing import Any

import pytest

from tests.support.ranks import run_ranks


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(request.param, "tests.distributed.row_gather_jobs:run")


def test_whole_tensors_are_torchs_own_to_the_last_bit(ranks):
    for rank in ranks:
        assert len(rank["whole"]) == 18
        assert [case for case, same in rank["whole"] if not same] == []


def test_what_a_reader_keeps_is_not_written_again(ranks):
    assert all(rank["kept"] for rank in ranks)
