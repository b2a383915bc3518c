"""The assignment puts every sequence in one micro-batch, within the budget, evenly, and the same on every rank."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spiral_mega.packing.microbatches import assign_microbatches
from spiral_mega.packing.training_sequence import SequenceKey, TrainingSequence
from spiral_mega.packing.tree import build_tree
from spiral_mega.packing.tree_parts import ATTENTION_TOKENS, Branch, cut_tree, make_branches
from tests.packing.random_trees import make, sequence_lists
from tests.support.ranks import run_ranks

Forest = list[list[Branch]]
REPLICAS = st.integers(1, 9)


@st.composite
def forests(draw: st.DrawFn) -> Forest:
    """Generate trees of up to 8 branches, of which neighbours share anything up to the whole of one."""
    trees = []
    for tree in range(draw(st.integers(1, 12))):
        lengths = draw(st.lists(st.integers(1, 3000), min_size=1, max_size=8))
        shared = [0, *(draw(st.integers(0, min(a, b))) for a, b in pairwise(lengths))]
        branches = zip(lengths, shared, strict=True)
        trees.append([Branch(SequenceKey(tree, i), *branch) for i, branch in enumerate(branches)])
    return trees


def budget_for(trees: Forest, spare: int) -> int:
    return max(branch.length for tree in trees for branch in tree) + spare


def tokens_in(trees: Forest, keys: list[SequenceKey]) -> int:
    """Count the distinct tokens of some sequences by definition: two share what they share with all between them."""
    total = 0
    for tree in trees:
        inside = [i for i, branch in enumerate(tree) if branch.key in keys]
        total += sum(tree[i].length for i in inside)
        total -= sum(
            min(branch.shared for branch in tree[i + 1 : j + 1]) for i, j in pairwise(inside)
        )
    return total


@given(forests(), st.integers(0, 8000), REPLICAS)
def test_every_sequence_is_in_exactly_one_micro_batch(
    trees: Forest, spare: int, num_replicas: int
) -> None:
    assignment = assign_microbatches(trees, budget_for(trees, spare), num_replicas)
    assigned = sorted(key for replica in assignment for keys in replica for key in keys)
    assert assigned == sorted(branch.key for tree in trees for branch in tree)


@given(forests(), st.integers(0, 8000), REPLICAS)
def test_no_micro_batch_exceeds_the_budget(trees: Forest, spare: int, num_replicas: int) -> None:
    budget = budget_for(trees, spare)
    assignment = assign_microbatches(trees, budget, num_replicas)
    assert all(tokens_in(trees, keys) <= budget for replica in assignment for keys in replica)


@given(forests(), st.integers(0, 8000), REPLICAS)
def test_every_replica_has_as_many_micro_batches_and_few_of_them(
    trees: Forest, spare: int, num_replicas: int
) -> None:
    budget = budget_for(trees, spare)
    assignment = assign_microbatches(trees, budget, num_replicas)
    assert len(assignment) == num_replicas
    (rounds,) = {len(replica) for replica in assignment}
    computed = sum(tokens_in(trees, keys) for replica in assignment for keys in replica)
    # Had one round fewer failed, every micro-batch of it would have been over half full.
    assert rounds <= 2 * -(-computed // (budget * num_replicas))


@given(forests(), st.integers(0, 8000), REPLICAS)
def test_replicas_have_about_the_same_work_at_any_time_and_in_total(
    trees: Forest, spare: int, num_replicas: int
) -> None:
    budget = budget_for(trees, spare)
    single = [[branch._replace(shared=0)] for tree in trees for branch in tree]
    cost = {tree[0].key: cut_tree(tree, budget)[0].cost for tree in single}
    assignment = assign_microbatches(single, budget, num_replicas)
    # A micro-batch that costs more than another holds a last part that found the other costlier still, or full.
    longest = budget_for(trees, 0)
    bound = longest + budget * longest / ATTENTION_TOKENS + 1e-6
    costs = [[sum(cost[key] for key in keys) for keys in replica] for replica in assignment]
    assert all(max(at_once) - min(at_once) <= bound for at_once in zip(*costs, strict=True))
    assert max(map(sum, costs)) - min(map(sum, costs)) <= bound


@given(forests(), st.integers(0, 8000))
def test_a_cut_tree_is_in_order_within_the_budget_and_no_cut_is_cheaper(
    trees: Forest, spare: int
) -> None:
    for tree in trees:
        budget = budget_for([tree], spare)
        parts = cut_tree(tree, budget)
        assert [key for part in parts for key in part.keys] == [branch.key for branch in tree]
        assert all(part.tokens == tokens_in(trees, part.keys) <= budget for part in parts)
        assert sum(part.tokens for part in parts) == fewest_tokens(tree, budget)


def fewest_tokens(tree: list[Branch], budget: int) -> int:
    """Return the fewest tokens in total, over all ways to cut the tree within the budget."""
    totals = []
    for num_cuts in range(len(tree)):
        for cuts in combinations(range(1, len(tree)), num_cuts):
            ranges = pairwise([0, *cuts, len(tree)])
            sizes = [tokens_in([tree], [branch.key for branch in tree[i:j]]) for i, j in ranges]
            if max(sizes) <= budget:
                totals.append(sum(sizes))
    return min(totals)


@given(sequence_lists(vocab=2, longest=12))
def test_assigned_tokens_are_those_of_the_trees_that_are_built(
    sequences: list[TrainingSequence],
) -> None:
    sequences = [s for s in sequences if s.key.prompt_index == sequences[0].key.prompt_index]
    by_key = {s.key: s for s in sequences}
    for budget in {max(s.num_tokens for s in sequences) + spare for spare in (0, 5, 1000)}:
        for part in cut_tree(make_branches(sequences), budget):
            tree = build_tree([by_key[key] for key in part.keys])
            assert tree.num_tokens == part.tokens
            # A token at depth d costs itself and 2 d + 1 half pairs of attention.
            assert part.cost == pytest.approx(
                part.tokens + (2 * tree.depth + 1).sum() / ATTENTION_TOKENS
            )


def test_a_tree_within_the_budget_stays_whole_unless_ranks_would_wait_for_it() -> None:
    tree = [Branch(SequenceKey(0, i), 100, 90 if i else 0) for i in range(8)]
    assert assign_microbatches([tree], 1000, 1) == [[[branch.key for branch in tree]]]
    wide = [Branch(SequenceKey(0, i), 100, 1 if i else 0) for i in range(8)]
    assert sorted(len(replica[0]) for replica in assign_microbatches([wide], 1000, 2)) == [4, 4]


def test_a_sequence_over_the_budget_is_an_error_that_says_what_to_raise() -> None:
    with pytest.raises(
        ValueError, match=r"70 tokens exceeds policy\.microbatch_tokens \(69\): raise"
    ):
        assign_microbatches([[Branch(SequenceKey(0, 0), 70, 0)]], 69, 2)


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_without_sequences_there_is_no_micro_batch(num_replicas: int) -> None:
    assert assign_microbatches([], 100, num_replicas) == [[] for _ in range(num_replicas)]


def test_fewer_sequences_than_ranks_leave_empty_micro_batches() -> None:
    assignment = assign_microbatches(
        [[Branch(SequenceKey(0, 0), 5, 0)], [Branch(SequenceKey(1, 0), 7, 0)]], 10, 4
    )
    assert sorted(assignment) == [[[]], [[]], [[(0, 0)]], [[(1, 0)]]]


def test_equal_sequences_are_shared_out_evenly() -> None:
    assignment = assign_microbatches([[Branch(SequenceKey(i, 0), 10, 0)] for i in range(24)], 60, 4)
    assert [[len(keys) for keys in replica] for replica in assignment] == [[6]] * 4


def sequences() -> list[TrainingSequence]:
    """Return four sequences of each prompt: two responses to it, one that reads them, and an unrelated one."""
    found = []
    for index in range(100, 94, -1):
        prompt = list(range(1 + index % 5))
        found.append(make(index, 0, prompt, [index] * (1 + index % 11)))
        found.append(make(index, 1, prompt, [index, *range(index % 7)]))
        found.append(make(index, 2, [*prompt, *found[-1].response_ids], [9, 9, index]))
        found.append(make(index, 3, [77], [index, 1]))
    return found


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_sequences_arrive_whole_and_where_they_are_assigned_whoever_held_them(
    world_size: int,
) -> None:
    holders = {"all on rank 0": 0, "one shuffle": 1, "another": 2}
    arguments = [(sequences(), 60, seed, 1) for seed in holders.values()]
    arguments += [
        (sequences()[:1], 60, 1, 1),
        ([], 60, 1, 1),
        (sequences(), 60, 1, min(2, world_size)),
    ]
    by_rank = run_ranks(world_size, "tests.packing.workers:distribute_all", arguments)
    *shuffled, single, nothing, in_pairs = zip(*by_rank, strict=True)
    for by_holder in shuffled:
        assert list(by_holder) == list(shuffled[0])
    arrived = [sequence for rank in shuffled[0] for microbatch in rank for sequence in microbatch]
    assert sorted(arrived, key=lambda s: s.key) == sorted(sequences(), key=lambda s: s.key)
    assert all(build_tree(each).num_tokens <= 60 for rank in shuffled[0] for each in rank if each)
    assert sorted(map(len, single)) == [1] * world_size
    assert [s for rank in single for microbatch in rank for s in microbatch] == sequences()[:1]
    assert list(nothing) == [[]] * world_size
    # Two ranks that hold one replica between them get the same, and the replicas have everything once.
    replicas = in_pairs[::2]
    assert in_pairs[1::2] == replicas[: world_size // 2]
    arrived = [
        sequence for replica in replicas for microbatch in replica for sequence in microbatch
    ]
    assert sorted(arrived, key=lambda s: s.key) == sorted(sequences(), key=lambda s: s.key)
