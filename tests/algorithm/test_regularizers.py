"""What the entropy bonus and each form of the KL optimise, by enumeration over a tiny autoregressive policy.

The expected gradient is taken through the package's own loss; the truth by finite differences of plain arithmetic.
"""

import math

import numpy as np
import pytest
import torch

from spiral_mega.algorithm.losses import make_loss
from spiral_mega.algorithm.regularizers import Regularizers, kl_estimate, sum_to_end
from spiral_mega.config import AlgorithmConfig, KlConfig
from spiral_mega.packing.training_sequence import SequenceKey, TrainingSequence
from spiral_mega.packing.tree_batch import pack
from spiral_mega.policy.loss import Totals, weighted_loss
from tests.algorithm.tiny_policy import RESPONSES, THETA, features, finite_differences, probability

REFERENCE = np.array([-0.4, 0.9, 0.0, 0.0, 0.0])
STATES = [0, 1]  # after no token, and after a 1 (a 0 ends the response)
BETA = 0.7


def one(theta, position):
    """P(token 1) in a state."""
    return 1 / (1 + math.exp(-float(np.dot(features(None, position), theta))))


def reach(position):
    """How often a state is met, as the policy is."""
    return 1.0 if position == 0 else one(THETA, 0)


def kl(p, q):
    """KL of two Bernoulli distributions."""
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def whole_kl(theta):
    """KL(pi || pi_ref) of whole responses."""
    return sum(
        probability(y, theta) * math.log(probability(y, theta) / probability(y, REFERENCE)) for y in RESPONSES
    )  # fmt: skip


def at_states(value):
    """Expected over the states that the policy visits now, whatever theta does to them."""
    return lambda theta: sum(reach(s) * value(theta, s) for s in STATES)


def expected_update(entropy_bonus=0.0, **kl_changes):
    """-gradient of the expected loss of responses without credit, each weighted by its probability."""
    config = AlgorithmConfig(
        entropy_bonus=entropy_bonus,
        kl=KlConfig(coefficient=BETA, **kl_changes) if kl_changes else None,
    )
    sequences = [
        TrainingSequence(
            SequenceKey(0, i), [0], list(y), [0.0] * len(y), 0.0, probability(y, THETA)
        )
        for i, y in enumerate(RESPONSES)
    ]
    batch = pack(sequences)
    theta = torch.tensor(THETA, requires_grad=True)
    flat = [(token, position) for y in RESPONSES for position, token in enumerate(y)]
    rows = torch.tensor([features(None, position) for _, position in flat], dtype=torch.float64)
    signs = torch.tensor([token * 2.0 - 1 for token, _ in flat], dtype=torch.float64)
    logits = rows @ theta
    logprobs = torch.nn.functional.logsigmoid(signs * logits)
    entropy = torch.distributions.Bernoulli(logits=logits).entropy()
    reference = torch.nn.functional.logsigmoid(signs * (rows @ torch.tensor(REFERENCE)))
    exact = {name: getattr(batch, name).double() for name in ("advantages", "weights")}
    batch = type(batch)(**{f: getattr(batch, f) for f in batch.__dataclass_fields__} | exact
                        | {"sampler_logprobs": logprobs.detach()})  # fmt: skip
    loss = weighted_loss(
        logprobs,
        entropy,
        batch,
        make_loss(config),
        Totals(),
        Regularizers.from_algorithm(config),
        reference if kl_changes else None,
    )
    loss.backward()
    return -theta.grad.numpy()


def check(update, goal):
    truth = finite_differences(goal)
    assert np.abs(truth).max() > 5e-3
    np.testing.assert_allclose(update, truth, rtol=0, atol=1e-7)  # weights pass through float32


def test_k1_as_a_reward_is_the_kl_of_whole_responses():
    check(expected_update(estimator="k1", apply="reward"), lambda theta: -BETA * whole_kl(theta))


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_k2_and_k3_as_rewards_leave_out_their_own_gradient(estimator):
    """The documented bias: the update is that of E_pi[sum of k at the policy as it was], not of KL."""

    def k(token, position):
        p, q = one(THETA, position), one(REFERENCE, position)
        d = math.log(q / p) if token else math.log((1 - q) / (1 - p))
        return d * d / 2 if estimator == "k2" else math.exp(d) - 1 - d

    def goal(theta):
        return -BETA * sum(
            probability(y, theta) * sum(k(token, position) for position, token in enumerate(y))
            for y in RESPONSES
        )

    update = expected_update(estimator=estimator, apply="reward")
    check(update, goal)
    assert np.abs(update - finite_differences(lambda theta: -BETA * whole_kl(theta))).max() > 0.01


def test_k2_as_a_loss_is_the_kl_at_the_states_that_were_sampled():
    goal = at_states(lambda theta, s: -BETA * kl(one(theta, s), one(REFERENCE, s)))
    check(expected_update(estimator="k2", apply="loss"), goal)


def test_k3_as_a_loss_is_the_reverse_kl_at_the_states_that_were_sampled():
    goal = at_states(lambda theta, s: -BETA * kl(one(REFERENCE, s), one(theta, s)))
    check(expected_update(estimator="k3", apply="loss"), goal)


def test_k1_as_a_loss_has_no_gradient_and_is_refused():
    with pytest.raises(ValueError, match=r"algorithm\.kl\.estimator is k1.*expected gradient is 0"):
        KlConfig(coefficient=1.0, estimator="k1", apply="loss")
    unchecked = KlConfig.model_construct(coefficient=1.0, estimator="k1", apply="loss")
    logprobs = torch.tensor(math.log(0.3), dtype=torch.float64, requires_grad=True)
    other = torch.log1p(-logprobs.exp())
    terms = [
        Regularizers(0.0, unchecked).penalty(lp, lp, torch.tensor(-1.0)) for lp in (logprobs, other)
    ]
    (0.3 * terms[0] + 0.7 * terms[1]).backward()
    assert float(logprobs.grad) == pytest.approx(0, abs=1e-12)


def test_the_entropy_bonus_is_the_entropy_at_the_states_that_were_sampled():
    def entropy(theta, s):
        p = one(theta, s)
        return -p * math.log(p) - (1 - p) * math.log(1 - p)

    check(expected_update(entropy_bonus=0.3), at_states(lambda theta, s: 0.3 * entropy(theta, s)))


def test_off_they_change_nothing():
    assert not expected_update().any()
    assert not Regularizers.from_algorithm(AlgorithmConfig()).active


def test_the_kl_estimators_agree_with_the_divergence_on_average():
    p, q = torch.tensor([0.2, 0.5, 0.3]).double(), torch.tensor([0.4, 0.4, 0.2]).double()
    truth = float((p * (p / q).log()).sum())
    for estimator in ("k1", "k3"):
        assert float((p * kl_estimate(p.log(), q.log(), estimator)).sum()) == pytest.approx(
            truth, rel=1e-12
        )
    assert (kl_estimate(p.log(), q.log(), "k3") >= 0).all()


def test_sums_to_the_end_stay_within_their_sequence():
    values = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    ids = torch.tensor([0, 0, 2, 2, 2, 3])
    assert sum_to_end(values, ids).tolist() == [3.0, 2.0, 28.0, 24.0, 16.0, 32.0]


def test_tokens_without_a_sampler_logprob_have_no_penalty_either():
    config = AlgorithmConfig(entropy_bonus=1.0, kl=KlConfig(coefficient=1.0))
    batch = pack([TrainingSequence(SequenceKey(0, 0), [0], [1, 2], [math.nan, -1.0], 0.0, 1.0)])
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    entropy = torch.tensor([1.0, 1.5], requires_grad=True)
    weighted_loss(
        logprobs,
        entropy,
        batch,
        make_loss(config),
        Totals(),
        Regularizers.from_algorithm(config),
        torch.tensor([-3.0, -3.0]),
    ).backward()
    assert logprobs.grad.tolist() == [0.0, 1.0]
    assert entropy.grad.tolist() == [0.0, -1.0]
