"""A token tree holds every distinct prefix of its sequences once, and a token sees exactly its own path."""

import itertools

import numpy as np
import pytest
from hypothesis import given

from spiral_mega.packing.training_sequence import TrainingSequence
from spiral_mega.packing.tree import TokenTree, build_tree, sort_tokens
from spiral_mega.packing.tree_layout import TreeLayout, find_segments
from tests.packing.random_trees import distinct_prefixes, make, sequence_lists, tokens_of


def path(tree: TokenTree, row: int) -> list[int]:
    """The rows from the root to `row`."""
    rows = [row]
    while (above := int(tree.parent[rows[-1]])) >= 0:
        rows.append(above)
    return rows[::-1]


def spelled(tree: TokenTree, row: int) -> tuple[int, ...]:
    return tuple(int(tree.token_ids[r]) for r in path(tree, row))


@given(sequence_lists())
def test_every_distinct_prefix_of_a_prompt_is_one_node(sequences: list[TrainingSequence]) -> None:
    tree = build_tree(sequences)
    assert tree.num_tokens == len(distinct_prefixes(sequences))
    rows = [spelled(tree, row) for row in range(tree.num_tokens)]
    assert sorted(rows) == sorted(prefix for _, prefix in distinct_prefixes(sequences))


@given(sequence_lists())
def test_each_response_position_leads_to_the_node_that_spells_its_sequence(
    sequences: list[TrainingSequence],
) -> None:
    tree = build_tree(sequences)
    nodes = iter(tree.response_nodes.tolist())
    for sequence in sequences:
        for stop in range(len(sequence.prompt_ids), sequence.num_tokens):
            assert spelled(tree, next(nodes)) == tokens_of(sequence)[: stop + 1]
    assert not list(nodes)


@given(sequence_lists())
def test_a_token_sees_exactly_its_path_and_knows_its_depth(
    sequences: list[TrainingSequence],
) -> None:
    tree = build_tree(sequences)
    for row in range(tree.num_tokens):
        seen = [j for j in range(tree.num_tokens) if j <= row < tree.subtree_end[j]]
        assert seen == path(tree, row)
        assert tree.depth[row] == len(seen) - 1


@given(sequence_lists())
def test_sorted_neighbours_share_what_they_share(sequences: list[TrainingSequence]) -> None:
    tokens, order, shared = sort_tokens(sequences)
    assert sorted(order) == list(range(len(sequences)))
    as_tuples = [tuple(each.tolist()) for each in tokens]
    assert as_tuples == sorted(map(tokens_of, sequences))
    for i, (a, b) in enumerate(itertools.pairwise(as_tuples)):
        n = shared[i + 1]
        assert a[:n] == b[:n]
        assert a[n : n + 1] != b[n : n + 1] or n == len(a) == len(b)


def test_large_token_ids_sort_as_numbers() -> None:
    sequences = [make(0, i, [token], [1]) for i, token in enumerate([151_935, 255, 256, 65_536, 3])]
    assert [int(tokens[0]) for tokens in sort_tokens(sequences).tokens] == [
        3,
        255,
        256,
        65_536,
        151_935,
    ]


def test_identical_sequences_are_one_path() -> None:
    once, twice = (build_tree([make(0, i, [1, 2], [3, 4]) for i in range(n)]) for n in (1, 2))
    assert once.num_tokens == twice.num_tokens == 4
    assert twice.response_nodes.tolist() == 2 * once.response_nodes.tolist()


def test_prompts_stay_apart() -> None:
    assert build_tree([make(0, 0, [1, 2], [3]), make(1, 0, [1, 2], [3])]).num_tokens == 6


def test_a_tree_written_by_hand() -> None:
    tree = build_tree(
        [make(0, 0, [5, 6], [8, 9]), make(0, 1, [5, 6], [7]), make(0, 2, [5, 6, 8], [4])]
    )
    assert tree.token_ids.tolist() == [5, 6, 7, 8, 4, 9]
    assert tree.depth.tolist() == [0, 1, 2, 2, 3, 3]
    assert tree.subtree_end.tolist() == [6, 6, 3, 6, 5, 6]
    assert tree.parent.tolist() == [-1, 0, 1, 1, 3, 3]
    assert tree.response_nodes.tolist() == [3, 5, 2, 4]
    assert [segment[:3] for segment in find_segments(tree.depth, tree.subtree_end)] == [
        (0, 2, 6),
        (2, 3, 3),
        (3, 4, 6),
        (4, 5, 5),
        (5, 6, 6),
    ]


def test_a_sequence_without_a_prompt_is_refused() -> None:
    # Nothing would predict its first token.
    with pytest.raises(ValueError, match="empty prompt"):
        build_tree([make(0, 0, [], [1])])


@given(sequence_lists(vocab=2, longest=12))
def test_the_blocks_of_attention_hold_every_visible_pair_once(
    sequences: list[TrainingSequence],
) -> None:
    tree = build_tree(sequences)
    rows = np.arange(tree.num_tokens)
    visible = (rows[None] <= rows[:, None]) & (rows[:, None] < tree.subtree_end[None])
    behind = tree.depth[:, None] - tree.depth[None]
    layout = TreeLayout(tree.depth, tree.subtree_end)
    for window in (None, 1, 2, 5, 100):
        seen = np.zeros((tree.num_tokens, tree.num_tokens), int)
        for blocks in layout.blocks(window):
            queries, keys = rows[_numpy(blocks.rows)], rows[_numpy(blocks.cols)]
            for b in range(len(blocks.bounds_q) - 1):
                q = queries[blocks.bounds_q[b] : blocks.bounds_q[b + 1]]
                k = keys[blocks.bounds_k[b] : blocks.bounds_k[b + 1]]
                assert len(q)
                assert len(k)
                for i, row in enumerate(q):
                    last = len(k) - len(q) + i + 1 if blocks.causal else len(k)
                    first = max(0, last - window) if blocks.causal and window is not None else 0
                    seen[row, k[first:last]] += 1
        assert (seen == (visible if window is None else visible & (behind < window))).all()


def _numpy(rows: object) -> object:
    return rows if isinstance(rows, slice) else rows.numpy()  # type: ignore[attr-defined]
