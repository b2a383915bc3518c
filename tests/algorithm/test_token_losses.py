"""Losses and their gradients against forms derived by hand, in float64; masks and extremes."""

import inspect
import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spiral_mega.algorithm.losses import LOSSES, MAX_LOG_RATIO, LossInputs, make_loss
from spiral_mega.config.schema import AlgorithmConfig, Loss

LOW, HIGH, CAP = 0.2, 0.3, 1.5
NAMES = ["importance_sampling", "ppo_clip", "cispo", "gspo", "truncated_importance_sampling"]
BAD = [math.nan, math.inf, -math.inf]


def section(name):
    """The configuration of a loss, with limits of its own."""
    if name == "importance_sampling":
        return {"name": name}
    limits = (
        {"ratio_cap": CAP}
        if name == "truncated_importance_sampling"
        else {"clip_low": LOW, "clip_high": HIGH}
    )
    return {"name": name, **limits}


def loss_named(name):
    return make_loss(AlgorithmConfig(loss=section(name)))


def run(name, policy, sampler, advantages, ids=None, weights=None, dtype=torch.float64):
    """Loss, gradient of the weighted sum with respect to the policy's log-probabilities, and the two masks."""
    logprobs = torch.tensor(policy, dtype=dtype, requires_grad=True)
    inputs = LossInputs(
        logprobs,
        torch.tensor(sampler, dtype=dtype),
        torch.tensor(advantages, dtype=dtype),
        torch.tensor(ids if ids is not None else [0] * len(policy), dtype=torch.long),
    )
    loss, clipped, masked = loss_named(name)(inputs)
    (loss * torch.tensor(weights or [1.0] * len(policy), dtype=dtype)).sum().backward()
    return loss.detach().tolist(), logprobs.grad.tolist(), clipped.tolist(), masked.tolist()


def by_hand(name, logp, sampler, advantage):
    """(loss, d loss / d logp, clipped) of one token of a one-token sequence."""
    r = math.exp(logp - sampler)
    if name == "importance_sampling":
        return -r * advantage, -r * advantage, False
    if name == "truncated_importance_sampling":
        weight = r if r < CAP else CAP
        return -weight * advantage * logp, -weight * advantage, r > CAP
    if name == "cispo":
        weight = sorted([1 - LOW, r, 1 + HIGH])[1]
        return -weight * advantage * logp, -weight * advantage, not 1 - LOW <= r <= 1 + HIGH
    if advantage > 0 and r > 1 + HIGH:
        return -(1 + HIGH) * advantage, 0.0, True
    if advantage < 0 and r < 1 - LOW:
        return -(1 - LOW) * advantage, 0.0, True
    return -r * advantage, -r * advantage, False


def test_every_loss_has_a_section_that_holds_its_limits():
    union, _ = get_args(Loss)
    sections = {
        each.model_fields["name"].default: each.model_fields.keys() - {"name"}
        for each in get_args(union)
    }
    limits = {
        name: inspect.signature(loss).parameters.keys() - {"inputs"}
        for name, loss in LOSSES.items()
    }
    assert sections == limits
    assert sorted(sections) == sorted(NAMES)


tokens = st.lists(st.tuples(st.floats(-3, 0), st.floats(-3, 0), st.floats(-2, 2)), max_size=8)


@pytest.mark.parametrize("name", NAMES)
@given(tokens)
@settings(max_examples=100, deadline=None)
def test_loss_and_gradient_equal_those_derived_by_hand(name, given_tokens):
    policy, sampler, advantages = ([token[i] for token in given_tokens] for i in range(3))
    loss, grad, clipped, masked = run(
        name, policy, sampler, advantages, ids=list(range(len(policy)))
    )
    hand = [by_hand(name, *token) for token in given_tokens]
    assert loss == pytest.approx([h[0] for h in hand], abs=1e-12)
    assert grad == pytest.approx([h[1] for h in hand], abs=1e-12)
    assert clipped == [h[2] for h in hand]
    assert not any(masked)


@pytest.mark.parametrize("name", NAMES)
def test_on_policy_every_loss_has_the_policy_gradient(name):
    policy, advantages = [-0.3, -1.2, -4.0, -0.01], [1.0, -0.5, 0.25, 2.0]
    ids, weights = [0, 1, 2, 3], [0.5, 2.0, 1.0, 0.1]
    _, grad, clipped, _ = run(name, policy, policy, advantages, ids, weights)
    assert grad == pytest.approx([-a * w for a, w in zip(advantages, weights, strict=True)])
    assert not any(clipped)


def test_gspo_ratio_is_the_geometric_mean_over_the_sequence():
    # Interleaved sequences of 3 and 2 tokens and a third, long and clipped; ids need not be in order.
    policy = [-1.0, -0.5, -2.0, -0.7, -0.1, -0.2, -0.2]
    sampler = [-1.1, -0.4, -1.9, -0.9, -0.3, -2.0, -2.0]
    ids, by_sequence = [4, 1, 4, 1, 4, 0, 0], {4: 0.8, 1: -1.5, 0: 0.6}
    weights = [0.5, 2.0, 0.5, 2.0, 0.5, 1.0, 1.0]
    loss, grad, clipped, _ = run(
        "gspo", policy, sampler, [by_sequence[i] for i in ids], ids, weights
    )
    for sequence, advantage in by_sequence.items():
        members = [t for t, i in enumerate(ids) if i == sequence]
        ratio = math.exp(sum(policy[t] - sampler[t] for t in members) / len(members))
        limited = sequence == 0
        for t in members:
            assert loss[t] == pytest.approx(-(1 + HIGH if limited else ratio) * advantage)
            # sum over the members of w (-s A), differentiated: L w (-A) s / L
            assert grad[t] == pytest.approx(0.0 if limited else -weights[t] * ratio * advantage)
            assert clipped[t] == limited


def test_gspo_leaves_masked_tokens_out_of_the_mean():
    policy, sampler, ids = [-1.0, -0.5, -2.0], [-1.1, math.nan, -2.2], [0, 0, 0]
    loss, grad, _, masked = run("gspo", policy, sampler, [1.0] * 3, ids)
    ratio = math.exp((0.1 + 0.2) / 2)
    assert loss == pytest.approx([-ratio, 0.0, -ratio])
    assert grad == pytest.approx([-ratio, 0.0, -ratio])
    assert masked == [False, True, False]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("policy_logprob", [-1.0, -math.inf, math.nan])
def test_a_token_without_a_sampler_logprob_has_no_loss_and_no_gradient(name, bad, policy_logprob):
    # Even if the policy has none for it either: 0 * NaN must not reach the gradient.
    policy, sampler = [-1.0, policy_logprob, -0.5], [-1.05, bad, -0.45]
    loss, grad, clipped, masked = run(name, policy, sampler, [1.0, 1e6, -1.0], ids=[0, 1, 2])
    assert (loss[1], grad[1]) == (0.0, 0.0)
    assert masked == [False, True, False]
    assert not any(clipped)
    alone = run(name, [-1.0, -0.5], [-1.05, -0.45], [1.0, -1.0], ids=[0, 1])
    assert (loss[0], loss[2]) == pytest.approx(tuple(alone[0]))
    assert (grad[0], grad[2]) == pytest.approx(tuple(alone[1]))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_huge_log_ratios_stay_finite_and_are_counted(name, dtype, advantage):
    # d = +1e4 and -1e4, in sequences of their own.
    policy, sampler = [-1.0, -1e4 - 1.0], [-1e4 - 1.0, -1.0]
    loss, grad, clipped, masked = run(
        name, policy, sampler, [advantage] * 2, ids=[0, 1], dtype=dtype
    )
    assert all(map(math.isfinite, loss + grad))
    assert clipped[0]
    assert not any(masked)
    if name in ("importance_sampling", "ppo_clip", "gspo"):
        assert grad == [0.0, 0.0]
        assert abs(loss[0]) <= math.exp(MAX_LOG_RATIO) * (1 + 1e-5)
    else:
        most, least = (1 + HIGH, 1 - LOW) if name == "cispo" else (CAP, 0.0)
        assert grad == pytest.approx([-most * advantage, -least * advantage])


def test_importance_sampling_counts_only_ratios_beyond_its_bound():
    just = MAX_LOG_RATIO - 1e-3
    loss, grad, clipped, _ = run(
        "importance_sampling", [0.0, 0.0], [-just, -MAX_LOG_RATIO - 1e-3], [1.0, 1.0]
    )
    assert clipped == [False, True]
    assert grad == [pytest.approx(-math.exp(just)), 0.0]
    assert loss == pytest.approx([-math.exp(just), -math.exp(MAX_LOG_RATIO)])


@pytest.mark.parametrize("name", NAMES)
def test_a_broken_policy_is_not_hidden(name):
    loss, *_ = run(name, [math.nan], [-1.0], [1.0])
    assert math.isnan(loss[0])


@pytest.mark.parametrize("name", NAMES)
def test_no_tokens_no_loss(name):
    assert run(name, [], [], []) == ([], [], [], [])


@pytest.mark.parametrize("name", NAMES)
def test_shapes_that_differ_are_refused(name):
    with pytest.raises(ValueError, match=r"\(2,\), \(1,\), \(2,\), \(2,\): each must be \[R\]"):
        run(name, [-1.0, -1.0], [-1.0], [1.0, 1.0])


@pytest.mark.parametrize("name", NAMES)
def test_sequences_packed_together_do_not_touch_each_other(name):
    policy, sampler, advantages = [-1.0, -0.4, -0.9], [-1.3, -0.6, -0.7], [0.5, 0.5, -2.0]
    together = run(name, policy, sampler, advantages, ids=[0, 0, 1])
    first = run(name, policy[:2], sampler[:2], advantages[:2], ids=[0, 0])
    second = run(name, policy[2:], sampler[2:], advantages[2:], ids=[0])
    for packed, a, b in zip(together, first, second, strict=True):
        assert packed == pytest.approx(a + b)


@pytest.mark.parametrize("name", NAMES)
def test_sequences_far_from_the_sampler_are_left_out_whole(name):
    # Mean log-ratios of 0.3, -0.3 and 0.05 where log(1.2) is the bound; the second has tokens on either side of it.
    policy, sampler = [-1.0, -0.5, -1.4, -0.9, -0.5, -0.3], [-1.3, -0.8, -1.0, -0.7, -0.6, -0.3]
    ids = [5, 5, 2, 2, 0, 0]
    config = AlgorithmConfig(loss=section(name), max_sequence_ratio=1.2)
    logprobs = torch.tensor(policy, dtype=torch.float64, requires_grad=True)
    given = [torch.tensor(each, dtype=torch.float64) for each in (sampler, [1.0] * 6)]
    loss_R, _, masked_R = make_loss(config)(LossInputs(logprobs, *given, torch.tensor(ids)))
    loss_R.sum().backward()
    assert masked_R.tolist() == [True] * 4 + [False] * 2
    assert loss_R.tolist()[:4] == logprobs.grad.tolist()[:4] == [0.0] * 4
    loss, grad, _, _ = run(name, policy[4:], sampler[4:], [1.0, 1.0], ids=[0, 0])
    assert loss_R.tolist()[4:] == pytest.approx(loss)
    assert logprobs.grad.tolist()[4:] == pytest.approx(grad)
