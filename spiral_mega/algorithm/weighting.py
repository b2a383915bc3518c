"""One weight for each trace, so that loss = sum over tokens of (weight of the trace) * (loss of the token).

weight = w_c / D, with w_c the weight of the trace's component c (`component_weights`) and D by its `loss_reduction`:

- `sum`: D = |B|, the problems of the batch, whether or not they have traces of this component
- `token_mean`: D = the component's response tokens
- `sequence_mean`: D = (the component's traces) * (the trace's own tokens)

D is taken over everything that one optimizer update sees, on all ranks: count locally with `component_totals`, sum
over ranks, then weigh. So neither micro-batches nor ranks change the gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, NamedTuple

from spiral_mega.algorithm.objectives import Objective
from spiral_mega.config.schema import AlgorithmConfig
from spiral_mega.traces import Episode, Trace

LossReduction = Literal["sum", "token_mean", "sequence_mean"]


class ComponentTotals(NamedTuple):
    """Problems of the batch (the same for every component), and the component's traces and response tokens."""

    problems: int
    traces: int
    tokens: int


def component_totals(episodes: Sequence[Episode], components: Iterable[str]) -> dict[str, ComponentTotals]:
    """Counts of these episodes by component, in the order of `components`; zeros where there are no traces.
    Traces of other components are not trained on, and not counted.

    Add them elementwise over ranks: every rank has the same keys, even one without episodes.
    """
    lengths: dict[str, list[int]] = {component: [] for component in components}
    for episode in episodes:
        for trace in episode.traces():
            if trace.component in lengths:
                lengths[trace.component].append(trace.length)
    return {component: ComponentTotals(len(episodes), len(each), sum(each)) for component, each in lengths.items()}


@dataclass(frozen=True, slots=True)
class Weighting:
    """The weight w_c and the reduction of each component."""

    weights: dict[str, float]
    reductions: dict[str, LossReduction]

    def trace_weight(self, trace: Trace, totals: dict[str, ComponentTotals]) -> float:
        """w_c / D, the same for every token of the trace. `totals` are the batch's, over all ranks.

        Raises ValueError if they cannot have counted this trace.
        """
        problems, traces, tokens = totals[trace.component]
        reduction = self.reductions[trace.component]
        denominator = {"sum": problems, "token_mean": tokens, "sequence_mean": traces * trace.length}[reduction]
        if denominator < 1:
            raise ValueError(
                f"the totals of {trace.component} are {problems} problems, {traces} traces and {tokens} tokens, which "
                f"leaves out a trace of {trace.length} tokens: count the episodes that are trained on"
            )
        return self.weights[trace.component] / denominator


def make_weighting(config: AlgorithmConfig, objective: Objective) -> Weighting:
    """Weights and reductions for the objective's components.

    `paper` is 1 each; `unbiased` is 1 / (the component's gradient scale, such as M and K (N2 - 1)), so that with `sum`
    the expected gradient is that of the goal. Raises ValueError if a scale is 0, or if numbers or reductions given
    by component do not name exactly the objective's components.
    """
    weights, reduction = config.component_weights, config.loss_reduction
    if isinstance(weights, dict):
        _check_names("component_weights", weights, objective)
    elif weights == "unbiased":
        weights = {name: _inverse(name, scale) for name, scale in objective.gradient_scales().items()}
    else:
        weights = dict.fromkeys(objective.components, 1.0)
    if isinstance(reduction, dict):
        _check_names("loss_reduction", reduction, objective)
    else:
        reduction = dict.fromkeys(objective.components, reduction)
    return Weighting(dict(weights), dict(reduction))


def scale_metrics(weighting: Weighting, objective: Objective) -> dict[str, float]:
    """What multiplies each component's part of the gradient: the estimator's scale (M, K (N2 - 1), ...), if it has one,
    and the weight that goes on top."""
    metrics = {f"weight/{component}": weight for component, weight in weighting.weights.items()}
    with suppress(ValueError):
        metrics |= {f"scale/{component}": scale for component, scale in objective.gradient_scales().items()}
    return metrics


def _inverse(component: str, scale: float) -> float:
    if scale == 0:
        raise ValueError(
            f"algorithm.component_weights is 'unbiased', but the {component} advantages are always 0 with these sample "
            "counts: sample more (sets need search_traces > set_size and num_sets > 1, groups more than one "
            "trace), or set the weights to 'paper' or numbers"
        )
    return 1.0 / scale


def _check_names(key: str, given: Iterable[str], objective: Objective) -> None:
    if set(given) != set(objective.components):
        raise ValueError(
            f"algorithm.{key} names {sorted(given)}: give a value for each of {sorted(objective.components)}, "
            "the components of this objective, and nothing else"
        )
