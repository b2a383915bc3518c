"""Buckets hold every tensor once, in order, and are as full as their size allows."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from spiral_mega.policy.weight_buckets import make_buckets


@given(st.lists(st.integers(0, 50)), st.integers(1, 100))
def test_buckets_are_in_order_within_the_limit_and_no_two_neighbours_fit_together(
    sizes: list[int], limit: int
) -> None:
    buckets = list(make_buckets(enumerate(sizes), lambda item: item[1], limit))
    assert [item for bucket in buckets for item in bucket] == list(enumerate(sizes))
    totals = [sum(size for _, size in bucket) for bucket in buckets]
    assert all(
        total <= limit or len(bucket) == 1 for bucket, total in zip(buckets, totals, strict=True)
    )
    assert all(
        total + after[0][1] > limit
        for total, (_, after) in zip(totals, pairwise(buckets), strict=False)
    )
