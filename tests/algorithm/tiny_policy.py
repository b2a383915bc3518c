"""A policy so small that every episode can be enumerated with its probability, and a recipe's expected update taken.

Five parameters write all traces: one or two tokens each, stop = 0. What the package computes from an episode (credit,
weights, token losses) is its own; what an episode's chance and the goal are is computed here by plain arithmetic.
"""

import itertools
import math

import numpy as np
import torch

from spiral_mega.algorithm.losses import LossInputs, make_loss
from spiral_mega.algorithm.objectives import make_objective
from spiral_mega.algorithm.weighting import component_totals, make_weighting
from spiral_mega.config.model_set import DEFAULT_MODEL, model_for
from spiral_mega.config.schema import AlgorithmConfig
from spiral_mega.traces import AGGREGATION, SEARCH, Episode, Problem, Trace
from tests.algorithm.test_unbiased_designs import draws as draws_of_design

RESPONSES = ((0,), (1, 0), (1, 1))
THETA = np.array([0.3, -0.5, 0.8, -0.4, 0.6])
REWARD = {(0,): 0.2, (1, 0): 1.0, (1, 1): -0.5}
ANSWER = {(0,): "7", (1, 0): "8", (1, 1): "7"}
PROBLEM = Problem("p", (), ("1",), "exact")


def features(shown, position):
    """Inputs of the logit of token 1: `shown` is None for search, else the set's responses, whose order matters."""
    if shown is None:
        return [1.0, float(position), 0.0, 0.0, 0.0]
    first, last = shown[0], shown[-1]
    return [
        1.0,
        float(position),
        float(len(first)),
        float(sum(last)),
        float(first == last) * (1 - position),
    ]


def probability(response, theta, shown=None):
    """pi(response), by plain arithmetic."""
    total = 1.0
    for position, token in enumerate(response):
        one = 1 / (1 + math.exp(-float(np.dot(features(shown, position), theta))))
        total *= one if token else 1 - one
    return total


def expectation(value, size, theta):
    """E[value(y_1, ..., y_size)] over independent search responses."""
    return sum(
        math.prod(probability(y, theta) for y in chosen) * value(*chosen)
        for chosen in itertools.product(RESPONSES, repeat=size)
    )


def mean_reward(theta, shown=None):
    return sum(probability(y, theta, shown) * REWARD[y] for y in RESPONSES)


def spiral_goal(search_theta, aggregation_theta, size=2):
    """E[r(y*)] over `size` search responses and the aggregation of them (eq. 5)."""
    return expectation(lambda *shown: mean_reward(aggregation_theta, shown), size, search_theta)


def finite_differences(goal):
    steps = np.eye(len(THETA)) * 1e-5
    return np.array([(goal(THETA + step) - goal(THETA - step)) / 2e-5 for step in steps])


def algorithm(**changes):
    return AlgorithmConfig(
        **{"search_traces": 3, "set_size": 2, "num_sets": 2, "aggregation_traces": 2, **changes}
    )


def draws(config):
    """The law of the sets of `config`'s design: (probability, sets), by enumeration."""
    shape = (config.search_traces, config.set_size, config.num_sets, config.set_design)
    return [(float(chance), sets) for chance, sets in draws_of_design(*shape)]


def drawn_sets(plan, rng):
    """The members of each set that the plan itself draws."""
    return [spec.members for spec in plan.draw_sets(rng)]


def component_of(plan, set_index):
    """The component of the answers to a set, whose level is found by counting."""
    levels = [level for level, each in enumerate(plan.levels) for _ in range(each.num_sets)]
    return AGGREGATION if levels[set_index] == 0 else f"{AGGREGATION}_{levels[set_index] + 1}"


def outcomes(config, laws, phi=THETA):
    """Every episode for every draw of the sets, as (probability, episode, what each trace was shown).

    A set's members are positions among the traces so far. THETA writes the search traces, `phi` the others.
    """
    plan = make_objective(config).plan
    for chance, sets in laws:
        yield from _complete(chance, plan, sets, [], [], phi)


def _complete(chance, plan, sets, traces, shown, phi):
    """Episodes that begin with `traces`."""
    if len(traces) < plan.search_traces:
        component, index, set_index, seen = SEARCH, len(traces), None, None
    elif (
        plan.aggregation_traces
        and len(traces) < plan.search_traces + len(sets) * plan.aggregation_traces
    ):
        set_index, index = divmod(len(traces) - plan.search_traces, plan.aggregation_traces)
        component = component_of(plan, set_index)
        seen = tuple(tuple(traces[j].response_ids) for j in sets[set_index])
    else:
        yield chance, episode_of(plan, sets, traces), shown
        return
    for y in RESPONSES:
        made = trace(component, index, y, set_index)
        likely = chance_of(y, seen, tuple(THETA if seen is None else phi))
        yield from _complete(chance * likely, plan, sets, [*traces, made], [*shown, seen], phi)


CHANCES: dict = {}


def chance_of(response, shown, theta):
    key = response, shown, theta
    if key not in CHANCES:
        CHANCES[key] = probability(response, theta, shown)
    return CHANCES[key]


def trace(component, index, response, set_index=None):
    text = f"{response} \\boxed{{{ANSWER[response]}}}"
    return Trace(
        component,
        index,
        [],
        list(response),
        [0.0] * len(response),
        "stop",
        text,
        set_index,
        REWARD[response],
    )


def episode_of(plan, sets, traces):
    """The traces (which later outcomes share) as an episode of copies."""
    own = [trace(t.component, t.index, tuple(t.response_ids), t.set_index) for t in traces]
    n = plan.search_traces
    starts = range(n, len(own), plan.aggregation_traces) if plan.aggregation_traces else ()
    return Episode(
        PROBLEM,
        0,
        own[:n],
        list(sets),
        [own[i : i + plan.aggregation_traces] for i in starts],
        index=0,
    )


def expected_gradient(config, episodes, theta=THETA, *, model=DEFAULT_MODEL, frozen=None):
    """The gradient of the loss of (probability, episode, shown), each a batch of its own, at theta.

    Of two models, that of the one called `model`, whose parameters theta then are.
    """
    objective = make_objective(config, frozen)
    models = (DEFAULT_MODEL,) if model == DEFAULT_MODEL else (SEARCH, AGGREGATION)
    weighting = make_weighting(config, objective)
    inputs, targets, advantages, ids, weights = [], [], [], [], []
    next_id = itertools.count()
    for chance, episode, shown in episodes:
        objective.assign_credit(episode)
        totals = component_totals([episode], objective.components)
        for made, seen in zip(episode.traces(), shown, strict=True):
            if made.component not in totals or model_for(made.component, models) != model:
                continue
            sequence, weight = next(next_id), chance * weighting.trace_weight(made, totals)
            for position, token in enumerate(made.response_ids):
                inputs.append(features(seen, position))
                targets.append(token)
                advantages.append(made.advantage)
                ids.append(sequence)
                weights.append(weight)
    parameters = torch.tensor(theta, requires_grad=True)
    logits = torch.tensor(inputs, dtype=torch.float64) @ parameters
    signs = torch.tensor(targets, dtype=torch.float64) * 2 - 1
    logprobs = torch.nn.functional.logsigmoid(signs * logits)
    advantages_R = torch.tensor(advantages, dtype=torch.float64)
    token_loss = make_loss(config)(
        LossInputs(logprobs, logprobs.detach(), advantages_R, torch.tensor(ids))
    )
    assert not token_loss.masked_R.any()
    assert not token_loss.clipped_R.any()
    (token_loss.loss_R * torch.tensor(weights, dtype=torch.float64)).sum().backward()
    return parameters.grad.numpy()


def sample_episode(plan, theta, rng):
    """One episode by the plan's own draw of sets, and what each trace was shown."""
    specs = plan.draw_sets(rng)
    traces, shown = [], []
    places = [(SEARCH, i, None) for i in range(plan.search_traces)]
    places += [
        (spec.component, i, l)
        for l, spec in enumerate(specs)
        for i in range(plan.aggregation_traces)
    ]
    for component, index, set_index in places:
        seen = (
            None
            if set_index is None
            else tuple(tuple(traces[j].response_ids) for j in specs[set_index].members)
        )
        chances = [probability(y, theta, seen) for y in RESPONSES]
        traces.append(
            trace(component, index, RESPONSES[rng.choice(len(RESPONSES), p=chances)], set_index)
        )
        shown.append(seen)
    return episode_of(plan, [spec.members for spec in specs], traces), shown
