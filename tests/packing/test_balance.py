"""The plan puts every sequence in one place, within the budget, evenly, and the same on every rank."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spiral_mega.packing.balance import ATTENTION_TOKENS, Branch, assign_microbatches, branches_of, cut
from spiral_mega.packing.training_sequence import TrainingSequence
from spiral_mega.packing.tree import build_tree
from tests.packing.random_trees import draws, make
from tests.support.ranks import run_ranks

WORLDS = st.integers(1, 9)


@st.composite
def forests(draw: st.DrawFn) -> list[list[Branch]]:
    """Trees of up to 8 branches, of which neighbours share anything up to the whole of one."""
    trees = []
    for tree in range(draw(st.integers(1, 12))):
        lengths = draw(st.lists(st.integers(1, 3000), min_size=1, max_size=8))
        shared = [0, *(draw(st.integers(0, min(a, b))) for a, b in pairwise(lengths))]
        trees.append([Branch((tree, i), n, s) for i, (n, s) in enumerate(zip(lengths, shared, strict=True))])
    return trees


def budget_for(trees: list[list[Branch]], spare: int) -> int:
    return max(branch.length for tree in trees for branch in tree) + spare


def tokens_in(trees: list[list[Branch]], members: list[tuple[int, int]]) -> int:
    """Distinct tokens of the sequences `members`, by definition: those that a sequence shares with another are those
    that it shares with every one between them."""
    total = 0
    for tree in trees:
        inside = [i for i, branch in enumerate(tree) if branch.key in members]
        total += sum(tree[i].length for i in inside)
        total -= sum(min(branch.shared for branch in tree[i + 1 : j + 1]) for i, j in pairwise(inside))
    return total


@given(forests(), st.integers(0, 8000), WORLDS)
def test_every_sequence_is_in_exactly_one_micro_batch(trees: list[list[Branch]], spare: int, world_size: int) -> None:
    plan = assign_microbatches(trees, budget_for(trees, spare), world_size)
    planned = sorted(key for rank in plan for members in rank for key in members)
    assert planned == sorted(branch.key for tree in trees for branch in tree)


@given(forests(), st.integers(0, 8000), WORLDS)
def test_no_micro_batch_exceeds_the_budget(trees: list[list[Branch]], spare: int, world_size: int) -> None:
    budget = budget_for(trees, spare)
    plan = assign_microbatches(trees, budget, world_size)
    assert all(tokens_in(trees, members) <= budget for rank in plan for members in rank)


@given(forests(), st.integers(0, 8000), WORLDS)
def test_every_rank_has_as_many_micro_batches_and_few_of_them(
    trees: list[list[Branch]], spare: int, world_size: int
) -> None:
    budget = budget_for(trees, spare)
    plan = assign_microbatches(trees, budget, world_size)
    assert len(plan) == world_size
    (rounds,) = {len(rank) for rank in plan}
    computed = sum(tokens_in(trees, members) for rank in plan for members in rank)
    # Had one round fewer failed, every micro-batch of it would have been over half full.
    assert rounds <= 2 * -(-computed // (budget * world_size))


@given(forests(), st.integers(0, 8000), WORLDS)
def test_ranks_have_about_the_same_work_at_any_time_and_in_total(
    trees: list[list[Branch]], spare: int, world_size: int
) -> None:
    budget = budget_for(trees, spare)
    cost = {key: part.cost for tree in trees for branch in tree for part in cut([branch], budget) for key in part.keys}
    plan = assign_microbatches([[b._replace(shared=0)] for tree in trees for b in tree], budget, world_size)
    # A micro-batch dearer than another holds a last part that found the other dearer still, or without room.
    longest = budget_for(trees, 0)
    bound = longest + budget * longest / ATTENTION_TOKENS + 1e-6
    costs = [[sum(cost[key] for key in members) for members in rank] for rank in plan]
    assert all(max(at_once) - min(at_once) <= bound for at_once in zip(*costs, strict=True))
    assert max(map(sum, costs)) - min(map(sum, costs)) <= bound


@given(forests(), st.integers(0, 8000))
def test_a_cut_tree_is_in_order_within_the_budget_and_no_cut_is_cheaper(trees: list[list[Branch]], spare: int) -> None:
    for tree in trees:
        budget = budget_for([tree], spare)
        parts = cut(tree, budget)
        assert [key for part in parts for key in part.keys] == [branch.key for branch in tree]
        assert all(part.tokens == tokens_in(trees, part.keys) <= budget for part in parts)
        cheapest = min(
            sum(sizes)
            for places in range(len(tree))
            for inner in combinations(range(1, len(tree)), places)
            if max(sizes := _sizes(tree, [0, *inner, len(tree)])) <= budget
        )
        assert sum(part.tokens for part in parts) == cheapest


def _sizes(tree: list[Branch], places: list[int]) -> list[int]:
    return [tokens_in([tree], [b.key for b in tree[i:j]]) for i, j in pairwise(places)]


@given(draws(vocab=2, longest=12))
def test_planned_tokens_are_those_of_the_trees_that_are_built(sequences: list[TrainingSequence]) -> None:
    sequences = [s for s in sequences if s.key[0] == sequences[0].key[0]]
    by_key = {s.key: s for s in sequences}
    for budget in {max(s.num_tokens for s in sequences) + spare for spare in (0, 5, 1000)}:
        for part in cut(branches_of(sequences), budget):
            tree = build_tree([by_key[key] for key in part.keys])
            assert tree.num_tokens == part.tokens
            # A token at depth d costs itself and 2 d + 1 half pairs of attention.
            assert part.cost == pytest.approx(part.tokens + (2 * tree.depth + 1).sum() / ATTENTION_TOKENS)


def test_a_tree_within_the_budget_stays_whole_unless_ranks_would_wait_for_it() -> None:
    tree = [Branch((0, i), 100, 90 if i else 0) for i in range(8)]
    whole = [branch.key for branch in tree]
    assert assign_microbatches([tree], 1000, 1) == [[whole]]
    assert all(rank[0] for rank in assign_microbatches([tree], 1000, 1))
    wide = [Branch((0, i), 100, 1 if i else 0) for i in range(8)]
    assert sorted(len(rank[0]) for rank in assign_microbatches([wide], 1000, 2)) == [4, 4]


def test_a_sequence_over_the_budget_is_an_error_that_says_what_to_raise() -> None:
    with pytest.raises(ValueError, match=r"70 tokens exceeds policy\.microbatch_tokens \(69\): raise"):
        assign_microbatches([[Branch((0, 0), 70, 0)]], 69, 2)


@pytest.mark.parametrize("world_size", [1, 3])
def test_nothing_to_plan_is_no_micro_batch(world_size: int) -> None:
    assert assign_microbatches([], 100, world_size) == [[] for _ in range(world_size)]


def test_fewer_sequences_than_ranks_leave_empty_micro_batches() -> None:
    plan = assign_microbatches([[Branch((0, 0), 5, 0)], [Branch((1, 0), 7, 0)]], 10, 4)
    assert sorted(plan) == [[[]], [[]], [[(0, 0)]], [[(1, 0)]]]


def test_equal_sequences_are_dealt_out_evenly() -> None:
    plan = assign_microbatches([[Branch((i, 0), 10, 0)] for i in range(24)], 60, 4)
    assert [[len(members) for members in rank] for rank in plan] == [[6]] * 4


def sequences() -> list[TrainingSequence]:
    """Draws of four: a prompt, two responses to it, one that reads them, and a stranger."""
    found = []
    for draw in range(100, 94, -1):
        prompt = list(range(1 + draw % 5))
        found.append(make(draw, 0, prompt, [draw] * (1 + draw % 11)))
        found.append(make(draw, 1, prompt, [draw, *range(draw % 7)]))
        found.append(make(draw, 2, [*prompt, *found[-1].response_ids], [9, 9, draw]))
        found.append(make(draw, 3, [77], [draw, 1]))
    return found


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_sequences_arrive_whole_and_where_the_plan_wants_them_whoever_owned_them(world_size: int) -> None:
    ownerships = {"all on rank 0": 0, "one shuffle": 1, "another": 2}
    arguments = [(sequences(), 60, seed, 1) for seed in ownerships.values()]
    arguments += [(sequences()[:1], 60, 1, 1), ([], 60, 1, 1), (sequences(), 60, 1, min(2, world_size))]
    by_rank = run_ranks(world_size, "tests.packing.workers:distribute_all", arguments)
    *shuffled, single, nothing, in_pairs = zip(*by_rank, strict=True)
    for parts in shuffled:
        assert list(parts) == list(shuffled[0])
    arrived = [sequence for rank in shuffled[0] for members in rank for sequence in members]
    assert sorted(arrived, key=lambda s: s.key) == sorted(sequences(), key=lambda s: s.key)
    assert all(build_tree(members).num_tokens <= 60 for rank in shuffled[0] for members in rank if members)
    assert sorted(map(len, single)) == [1] * world_size
    assert [s for rank in single for members in rank for s in members] == sequences()[:1]
    assert list(nothing) == [[]] * world_size
    # Two ranks that hold one replica between them get the same, and the replicas have everything once.
    replicas = in_pairs[::2]
    assert in_pairs[1::2] == replicas[: world_size // 2]
    arrived = [sequence for replica in replicas for members in replica for sequence in members]
    assert sorted(arrived, key=lambda s: s.key) == sorted(sequences(), key=lambda s: s.key)
