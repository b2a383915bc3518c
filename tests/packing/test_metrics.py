"""Packing metrics against numbers counted by hand."""

import pytest

from spiral_mega.packing.tree_parts import ATTENTION_TOKENS
from tests.packing.random_trees import make
from tests.support.ranks import run_ranks

# 7 tokens flat; as a tree 1 2 (3 4 | 5): 5. The same tokens under another prompt index stay apart.
FORK = [make(0, 0, [1, 2], [3, 4]), make(0, 1, [1, 2], [5])]
OTHER = [make(1, 0, [1, 2], [3, 4])]
LONE = [make(2, 0, [7], [8, 9])]


def test_one_rank() -> None:
    (found,) = run_ranks(1, "tests.packing.workers:measure", ([[[FORK + OTHER, LONE]]], 10))
    assert found[0] == pytest.approx(
        {
            "packing/merge_ratio": (7 + 4 + 3) / (5 + 4 + 3),
            "packing/fill": 12 / 20,
            "packing/balance": 1,
        }
    )


def test_two_ranks_count_together_and_wait_for_the_more_expensive() -> None:
    cases = [[[FORK], [OTHER]], [[LONE, FORK], [OTHER, []]], [[], []]]
    by_rank = run_ranks(2, "tests.packing.workers:measure", (cases, 8))
    assert by_rank[0] == by_rank[1]
    together, half_empty, nothing = by_rank[0]
    # Token at depth d: 1 + (2 d + 1) / ATTENTION_TOKENS. The fork has depths 0 1 2 2 3, the other 0 1 2 3.
    fork, other, lone = (
        5 + 21 / ATTENTION_TOKENS,
        4 + 16 / ATTENTION_TOKENS,
        3 + 9 / ATTENTION_TOKENS,
    )
    assert together == pytest.approx(
        {
            "packing/merge_ratio": 11 / 9,
            "packing/fill": 9 / 16,
            "packing/balance": (fork + other) / (2 * fork),
        }
    )
    assert half_empty == pytest.approx(
        {
            "packing/merge_ratio": 14 / 12,
            "packing/fill": 12 / 32,
            "packing/balance": (lone + fork + other) / (2 * (other + fork)),
        }
    )
    assert nothing == {}
