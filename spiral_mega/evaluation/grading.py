"""From an episode to the facts that harnesses and analysis work with."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from spiral_mega.analysis import episode_stats
from spiral_mega.evaluation.graded_episode import GradedEpisode
from spiral_mega.rewards import VerifierPool, group_answers
from spiral_mega.traces import Episode


def grade(
    episode: Episode, cuts: Sequence[int], verifier: VerifierPool, tokenizer: PreTrainedTokenizerBase
) -> GradedEpisode:
    """Group the answers of all traces, and judge the search traces as they would stand after each budget of `cuts`."""
    groups = group_answers([trace.answer_text for trace in episode.traces()], episode.problem.verifier, verifier)
    return GradedEpisode.of(
        episode, groups, _cut_rewards(episode, cuts, verifier, tokenizer), episode_stats(episode, groups)
    )


def _cut_rewards(
    episode: Episode, cuts: Sequence[int], verifier: VerifierPool, tokenizer: PreTrainedTokenizerBase
) -> dict[str, list[float]]:
    """By budget, the rewards of the search traces cut there; one that ended in time keeps its reward."""
    problem = episode.problem
    asked = {
        (budget, trace.index): verifier.submit(
            tokenizer.decode(trace.response_ids[:budget], skip_special_tokens=True), problem.answer, problem.verifier
        )
        for budget in cuts
        for trace in episode.search
        if trace.length > budget
    }
    return {
        str(budget): [
            asked[budget, trace.index].result().reward if (budget, trace.index) in asked else trace.reward
            for trace in episode.search
        ]
        for budget in cuts
    }
