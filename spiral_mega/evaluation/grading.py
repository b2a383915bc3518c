"""Grade a sampled episode: group its answers, and verify its truncated search traces."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from spiral_mega.analysis import episode_stats
from spiral_mega.evaluation.graded_episode import GradedEpisode
from spiral_mega.rewards import VerifierPool, group_answers
from spiral_mega.traces import Episode


def grade(
    episode: Episode,
    token_budgets: Sequence[int],
    verifier: VerifierPool,
    tokenizer: PreTrainedTokenizerBase,
) -> GradedEpisode:
    """Group the answers of all traces, and verify search traces truncated to each token budget."""
    answers = [trace.answer_text for trace in episode.traces()]
    groups = group_answers(answers, episode.problem.verifier, verifier)
    rewards = _truncated_rewards(episode, token_budgets, verifier, tokenizer)
    return GradedEpisode.from_episode(episode, groups, rewards, episode_stats(episode, groups))


def _truncated_rewards(
    episode: Episode,
    token_budgets: Sequence[int],
    verifier: VerifierPool,
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, list[float]]:
    """Return, by budget, the search traces' rewards; a trace within the budget keeps its reward."""
    problem = episode.problem
    verdicts = {}  # submitted together, so that the pool's processes verify at the same time
    for budget in token_budgets:
        for trace in episode.search:
            if trace.length > budget:
                text = tokenizer.decode(trace.response_ids[:budget], skip_special_tokens=True)
                verdicts[budget, trace.index] = verifier.submit(
                    text, problem.answer, problem.verifier
                )
    rewards: dict[str, list[float]] = {}
    for budget in token_budgets:
        rewards[str(budget)] = []
        for trace in episode.search:
            verdict = verdicts.get((budget, trace.index))
            rewards[str(budget)].append(
                trace.reward if verdict is None else verdict.result().reward
            )
    return rewards
