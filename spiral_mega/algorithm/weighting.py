"""Weight traces and turn them into training sequences: loss = sum over tokens of (trace's weight) *
(token's loss).

weight = w_c / D, with w_c the weight of the trace's component c (`component_weights`) and D by its
`loss_reduction`:

- `sum`: D = |B|, the problems of the update, whether or not they have traces of this component
- `token_mean`: D = the component's response tokens
- `sequence_mean`: D = (the component's traces) * (the trace's own tokens)

D covers everything that one optimizer update sees, on all ranks, so neither micro-batches nor ranks
change the gradient:

    component_totals (each rank) --> sum over ranks --> training_sequences
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from spiral_mega.algorithm.objectives import Objective
from spiral_mega.config.model_set import model_for
from spiral_mega.config.schema import AlgorithmConfig, LossReduction
from spiral_mega.packing.training_sequence import SequenceKey, TrainingSequence
from spiral_mega.traces import Episode, Trace


class ComponentTotals(NamedTuple):
    """Problems (the same for every component), and the component's traces and response tokens."""

    problems: int
    traces: int
    tokens: int


def component_totals(
    episodes: Sequence[Episode], components: Iterable[str]
) -> dict[str, ComponentTotals]:
    """Count these episodes by component, in the order of `components`; zeros for a component
    without traces.

    Traces of other components are not trained on, and not counted. Add the totals elementwise over
    ranks: every rank has the same keys, even one without episodes.
    """
    lengths: dict[str, list[int]] = {component: [] for component in components}
    for episode in episodes:
        for trace in episode.traces():
            if trace.component in lengths:
                lengths[trace.component].append(trace.length)
    totals = {}
    for component, tokens in lengths.items():
        totals[component] = ComponentTotals(
            problems=len(episodes), traces=len(tokens), tokens=sum(tokens)
        )
    return totals


@dataclass(frozen=True, slots=True)
class Weighting:
    """The weight w_c and the reduction of each component."""

    weights: dict[str, float]
    reductions: dict[str, LossReduction]

    def trace_weight(self, trace: Trace, totals: dict[str, ComponentTotals]) -> float:
        """Return w_c / D, the same for every token of the trace. `totals` are the update's, over
        all ranks.

        Raises ValueError if they cannot have counted this trace.
        """
        problems, traces, tokens = totals[trace.component]
        reduction = self.reductions[trace.component]
        denominator = {
            "sum": problems,
            "token_mean": tokens,
            "sequence_mean": traces * trace.length,
        }[reduction]
        if denominator < 1:
            raise ValueError(
                f"the totals of {trace.component} are {problems} problems, {traces} traces and "
                f"{tokens} tokens, which leaves out a trace of {trace.length} tokens: count the "
                "episodes that are trained on"
            )
        return self.weights[trace.component] / denominator


def make_weighting(config: AlgorithmConfig, objective: Objective) -> Weighting:
    """Return weights and reductions for the objective's components.

    Weights `paper` are 1 each; `unbiased` are 1 / (the component's gradient scale, such as M and K
    (N2 - 1)), so that with `sum` the expected gradient is that of J. Raises ValueError if a scale
    is 0, or if weights or reductions given by component do not name exactly the objective's
    components.
    """
    return Weighting(
        _component_weights(config, objective), _component_reductions(config, objective)
    )


def training_sequences(
    episodes: Sequence[Episode],
    weighting: Weighting,
    totals: dict[str, ComponentTotals],
    models: Collection[str],
    *,
    include_ineffective: bool,
) -> dict[str, list[TrainingSequence]]:
    """Return the weighted traces of `episodes` as training sequences, by the one of `models` that
    wrote them.

    Traces of components that are not in `totals`, empty ones and, unless `include_ineffective` (for
    regularizers, which act on every trace), ineffective ones are left out. `totals` are the
    update's, over all ranks.
    """
    sequences: dict[str, list[TrainingSequence]] = {model: [] for model in models}
    for episode in episodes:
        for position, trace in enumerate(episode.traces()):
            trained = trace.component in totals and (trace.effective or include_ineffective)
            if not trained or not trace.response_ids:
                continue
            sequence = TrainingSequence(
                key=SequenceKey(episode.index, position),
                prompt_ids=trace.prompt_ids,
                response_ids=trace.response_ids,
                sampler_logprobs=trace.logprobs,
                advantage=trace.advantage,
                weight=weighting.trace_weight(trace, totals),
                observation_spans=tuple(trace.observation_spans),
            )
            sequences[model_for(trace.component, models)].append(sequence)
    return sequences


def scale_metrics(weighting: Weighting, objective: Objective) -> dict[str, float]:
    """Return the factors of each component's part of the gradient, as metrics.

    `weight/*`: the component's weight; `scale/*`: the estimator's own scale (M, K (N2 - 1), ...),
    if it has one.
    """
    metrics = {f"weight/{component}": weight for component, weight in weighting.weights.items()}
    with suppress(ValueError):
        metrics |= {
            f"scale/{component}": scale for component, scale in objective.gradient_scales().items()
        }
    return metrics


def _component_weights(config: AlgorithmConfig, objective: Objective) -> dict[str, float]:
    weights = config.component_weights
    if isinstance(weights, dict):
        _check_names("component_weights", weights, objective)
        return weights
    if weights == "unbiased":
        return {name: _inverse(name, scale) for name, scale in objective.gradient_scales().items()}
    return dict.fromkeys(objective.components, 1.0)


def _component_reductions(
    config: AlgorithmConfig, objective: Objective
) -> dict[str, LossReduction]:
    reduction = config.loss_reduction
    if isinstance(reduction, dict):
        _check_names("loss_reduction", reduction, objective)
        return reduction
    return dict.fromkeys(objective.components, reduction)


def _inverse(component: str, scale: float) -> float:
    if scale == 0:
        raise ValueError(
            f"algorithm.component_weights is 'unbiased', but the {component} advantages are always "
            "0 with these sample counts: sample more (sets need search_traces > set_size and "
            "num_sets > 1, groups more than one trace), or set the weights to 'paper' or numbers"
        )
    return 1.0 / scale


def _check_names(key: str, given: Iterable[str], objective: Objective) -> None:
    if set(given) != set(objective.components):
        raise ValueError(
            f"algorithm.{key} names {sorted(given)}: give a value for each of "
            f"{sorted(objective.components)}, the components of this objective, and nothing else"
        )
