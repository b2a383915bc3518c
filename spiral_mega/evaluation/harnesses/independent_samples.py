"""What the harnesses over independent responses (pass_at_k, majority, best_of_n) have in common."""

from __future__ import annotations

from collections.abc import Sequence

from spiral_mega.algorithm.sampling_plan import SamplingPlan
from spiral_mega.config.harnesses import BestOfN, Majority, PassAtK
from spiral_mega.evaluation.graded_episode import GradedEpisode, Measure, mean_tokens

Samples = PassAtK | Majority | BestOfN


def samples_plan(harness: Samples) -> SamplingPlan:
    return SamplingPlan(harness.samples)


def numbers_of_samples(harness: Samples) -> list[int]:
    """The k to report: those given, or the powers of two up to the number of samples, and that number."""
    if harness.ks is not None:
        return sorted(set(harness.ks))
    powers = {2**i for i in range(harness.samples.bit_length())}
    return sorted({k for k in powers if k <= harness.samples} | {harness.samples})


def samples_measure(
    harness: Samples, metric: str, k: int, values: list[float], graded: Sequence[GradedEpisode], longest: int
) -> Measure:
    """A measure of k responses, which cost k times the mean response."""
    spent = [each.spent(range(harness.samples)) for each in graded]
    return Measure(
        harness=harness.name or harness.kind,
        metric=metric,
        axis="k",
        x=k,
        parallel=k,
        values=values,
        tokens=mean_tokens(spent, k / harness.samples),
        budget=k * longest,
    )
