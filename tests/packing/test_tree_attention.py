"""Tree attention is softmax attention of each token over its own path."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spiral_mega.packing.attention import BACKENDS, tree_attention
from spiral_mega.packing.training_sequence import TrainingSequence
from spiral_mega.packing.tree import TokenTree, build_tree
from spiral_mega.packing.tree_layout import TreeLayout
from spiral_mega.packing.varlen import ScoreMod
from tests.packing.random_trees import make, sequence_lists
from tests.support.largest_tensor import LargestTensor

HEADS = st.sampled_from([(2, 2), (4, 2), (3, 1)])
SCORE_MODS = st.builds(
    ScoreMod, st.just(0.4), st.sampled_from([None, 2.0]), st.sampled_from([None, 1, 2, 4, 7, 100])
)  # 0.4 is not 1 / sqrt(8)
BRANCHING = [
    make(0, 0, [1, 2, 3], [4, 5]),
    make(0, 1, [1, 2, 3], [4, 6, 7]),
    make(0, 2, [1, 2, 3, 4, 5, 8], [9]),
    make(0, 3, [1, 7], [7, 7, 7]),
    make(1, 0, [1, 2], [3]),
]


def projections(tree: TokenTree, heads: tuple[int, int], seed: int = 0) -> list[torch.Tensor]:
    """q [T, Hq, 8], k, v [T, Hkv, 8] and sinks [Hq], float64."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(tree.num_tokens, heads[i], 8) for i in (0, 1, 1)] + [(heads[0],)]
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes
    ]


def by_definition(
    tree: TokenTree,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    score_mod: ScoreMod,
) -> torch.Tensor:
    """Attend from each query to the keys of its ancestors, found one by one through `parent`."""
    rows = []
    for row in range(tree.num_tokens):
        path = [row]
        while tree.parent[path[-1]] >= 0:
            path.append(int(tree.parent[path[-1]]))
        path = path[: score_mod.window]
        group = q.shape[1] // k.shape[1]
        keys, values = (x[path].repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("hd,khd->hk", q[row], keys) * score_mod.scale
        if score_mod.softcap is not None:
            scores = score_mod.softcap * torch.tanh(scores / score_mod.softcap)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None]], dim=1)
        rows.append(torch.einsum("hk,khd->hd", scores.softmax(-1)[:, : len(path)], values))
    return torch.stack(rows)


def layout_of(tree: TokenTree) -> TreeLayout:
    return TreeLayout(tree.depth, tree.subtree_end)


@settings(deadline=None, max_examples=60)
@given(sequence_lists(vocab=2), HEADS, SCORE_MODS, st.booleans())
def test_forward_and_backward_are_those_of_the_definition(
    sequences: list[TrainingSequence], heads: tuple[int, int], score_mod: ScoreMod, with_sinks: bool
) -> None:
    tree = build_tree(sequences)
    *inputs, sinks = projections(tree, heads)
    given_sinks = sinks if with_sinks else None
    trained = [*inputs, sinks] if with_sinks else inputs
    expected = by_definition(tree, *inputs, given_sinks, score_mod)
    found = BACKENDS["tree_torch"](*inputs, given_sinks, layout_of(tree), score_mod)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    upstream = torch.randn(expected.shape, dtype=torch.float64)
    for ours, theirs in zip(
        torch.autograd.grad(found, trained, upstream),
        torch.autograd.grad(expected, trained, upstream),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@settings(deadline=None, max_examples=60)
@given(sequence_lists(vocab=2), HEADS, SCORE_MODS, st.booleans(), st.data())
def test_selected_queries_attend_as_they_do_among_all(
    sequences: list[TrainingSequence],
    heads: tuple[int, int],
    score_mod: ScoreMod,
    with_sinks: bool,
    data: st.DataObject,
) -> None:
    """As with context parallelism: each row's output is the same, and gradients add up over the ranks' rows."""
    tree = build_tree(sequences)
    q, k, v, sinks = projections(tree, heads)
    trained = [q, k, v, sinks] if with_sinks else [q, k, v]
    expected = by_definition(tree, q, k, v, sinks if with_sinks else None, score_mod)
    ranks = data.draw(
        st.lists(st.integers(0, 2), min_size=tree.num_tokens, max_size=tree.num_tokens)
    )
    shares = [np.flatnonzero(np.equal(ranks, rank)) for rank in sorted(set(ranks))]
    parts = []
    for rows in shares:
        layout = layout_of(tree).select_queries(rows)
        parts.append(
            BACKENDS["tree_torch"](q[rows], k, v, sinks if with_sinks else None, layout, score_mod)
        )
        torch.testing.assert_close(parts[-1], expected[rows], rtol=0, atol=1e-12)
    upstream = torch.randn(expected.shape, dtype=torch.float64)
    found = torch.autograd.grad(parts, trained, [upstream[rows] for rows in shares])
    for ours, theirs in zip(found, torch.autograd.grad(expected, trained, upstream), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 3])
def test_flex_attention_sees_the_same(window: int | None, softcap: float | None) -> None:
    # Forward only: FlexAttention has no backward on CPU.
    tree, score_mod = build_tree(BRANCHING), ScoreMod(0.4, softcap, window)
    q, k, v, sinks = (x.detach() for x in projections(tree, (4, 2)))
    expected = by_definition(tree, q, k, v, None, score_mod)
    found = BACKENDS["tree_flex"](q, k, v, None, layout_of(tree), score_mod)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    some = np.array([0, 2, 3, 7, 8])
    found = BACKENDS["tree_flex"](
        q[some], k, v, None, layout_of(tree).select_queries(some), score_mod
    )
    torch.testing.assert_close(found, expected[some], rtol=0, atol=1e-9)
    with pytest.raises(ValueError, match="no attention sinks"):
        BACKENDS["tree_flex"](q, k, v, sinks, layout_of(tree), score_mod)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("score_mod", [ScoreMod(0.4), ScoreMod(0.4, None, 3), ScoreMod(0.4, 2.0)])
def test_lower_precision_rounds_once(dtype: torch.dtype, score_mod: ScoreMod) -> None:
    tree = build_tree(BRANCHING)
    exact = [x.detach().to(dtype).double().requires_grad_() for x in projections(tree, (4, 2))[:3]]
    low = [x.detach().to(dtype).requires_grad_() for x in exact]
    expected = by_definition(tree, *exact, None, score_mod)
    found = BACKENDS["tree_torch"](*low, None, layout_of(tree), score_mod)
    assert found.dtype == dtype
    allowed = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), expected, rtol=allowed, atol=allowed)
    upstream = torch.ones_like(expected)
    for ours, theirs in zip(
        torch.autograd.grad(found, low, upstream.to(dtype)),
        torch.autograd.grad(expected, exact, upstream),
        strict=True,
    ):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), theirs, rtol=4 * allowed, atol=4 * allowed)


@pytest.mark.parametrize("score_mod", [ScoreMod(0.4), ScoreMod(0.4, None, 3), ScoreMod(0.4, 2.0)])
def test_nothing_of_one_branch_reaches_another(score_mod: ScoreMod) -> None:
    # Not even NaN, which any weight but an exact absence would spread.
    tree = build_tree(BRANCHING)
    clean = [x.detach() for x in projections(tree, (4, 2))[:3]]
    expected = BACKENDS["tree_torch"](*clean, None, layout_of(tree), score_mod)
    for poisoned in range(tree.num_tokens):
        inputs = [x.clone() for x in clean]
        for x in inputs:
            x[poisoned] = math.nan
        found = BACKENDS["tree_torch"](*inputs, None, layout_of(tree), score_mod)
        elsewhere = torch.ones(tree.num_tokens, dtype=torch.bool)
        elsewhere[poisoned : tree.subtree_end[poisoned]] = False
        above = poisoned
        while above >= 0:  # a zero weight on NaN is NaN, so its own path may show it
            elsewhere[above] = False
            above = int(tree.parent[above])
        assert torch.equal(found[elsewhere], expected[elsewhere])
        assert found[poisoned].isnan().all()


def test_scores_are_materialised_for_one_sequence_at_a_time() -> None:
    """Also for sequences of equal lengths, as when all are truncated at the limit."""
    length, heads = 128, 2
    tree = build_tree([make(i, 0, [i], list(range(1, length))) for i in range(12)])
    *inputs, _ = projections(tree, (heads, heads))
    with LargestTensor() as watch:
        BACKENDS["tree_torch"](
            *inputs, None, layout_of(tree), ScoreMod(0.4, softcap=2.0)
        ).sum().backward()
    assert watch.elements <= heads * length * length


def call(
    module: torch.nn.Module | None = None, mask: torch.Tensor | None = None, **arguments: Any
) -> torch.Tensor:
    tree = build_tree(BRANCHING)
    q, k, v = (x.transpose(0, 1)[None] for x in projections(tree, (4, 2))[:3])
    arguments = {"tree": layout_of(tree), "backend": BACKENDS["tree_torch"]} | arguments
    return tree_attention(module or torch.nn.Module(), q, k, v, mask, **arguments)[0]


def test_it_is_called_as_transformers_calls_an_attention() -> None:
    tree = build_tree(BRANCHING)
    q, k, v = projections(tree, (4, 2))[:3]
    expected = by_definition(tree, q, k, v, None, ScoreMod(8**-0.5, 2.0, 3))
    torch.testing.assert_close(
        call(sliding_window=3, softcap=2.0), expected[None], rtol=0, atol=1e-12
    )


class BothWays(torch.nn.Module):
    is_causal = False


@pytest.mark.parametrize(
    "arguments",
    [{"dropout": 0.1}, {"mask": torch.zeros(1, 1, 17, 17)}, {"module": BothWays()}],
    ids=lambda arguments: next(iter(arguments)),
)
def test_unsupported_attention_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="causal along each path"):
        call(**arguments)


def test_a_model_that_does_not_pass_on_the_tree_is_refused() -> None:
    with pytest.raises(ValueError, match="given no token tree"):
        call(tree=None)
