"""Whole tensors from the ranks' rows are torch's own: by broadcasts, and in shared memory that is freed after use."""

from typing import Any

import pytest

from tests.support.ranks import run_ranks


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(request.param, "tests.rows_jobs:run")


def test_whole_tensors_are_torchs_own_to_the_last_bit(ranks):
    for rank in ranks:
        assert len(rank["whole"]) == 36
        assert [way for way, same in rank["whole"] if not same] == []


def test_what_a_reader_keeps_is_not_written_again(ranks):
    assert all(rank["kept"] for rank in ranks)


def test_memory_is_used_again_and_goes_with_its_last_user(ranks):
    for rank in ranks:
        assert rank["memory"] == {"mapped": 0, "files": 0, "left": 0}


def test_all_ranks_hear_that_one_cannot_map_the_others_memory(ranks):
    assert all("cannot share" in rank["refused"] and "denied" in rank["refused"] for rank in ranks)


def test_ranks_that_cannot_share_memory_broadcast(ranks):
    assert all(rank["choice"] == ["SharedRows", "BroadcastRows"] for rank in ranks)
