"""Which episodes the harnesses need, and sampling them in chunks of problems.

Each chunk starts from an empty engine, and its records are written to disk once it is complete. So
a chunk comes out the same whether or not the evaluation was interrupted before it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from spiral_mega.algorithm.sampling_plan import SamplingPlan
from spiral_mega.config import Config
from spiral_mega.distributed.collectives import gather_objects
from spiral_mega.distributed.runtime import Runtime
from spiral_mega.errors import ConfigError
from spiral_mega.evaluation.graded_episode import GradedEpisode
from spiral_mega.evaluation.harnesses.harness import Harness
from spiral_mega.evaluation.harnesses.registry import read_harnesses
from spiral_mega.evaluation.store import Store
from spiral_mega.rollout.episode_builder import Task
from spiral_mega.rollout.pipeline import Pipeline
from spiral_mega.traces import Episode, Problem

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Episodes that harnesses share: their plan, and the token budgets to grade search traces at."""

    plan: SamplingPlan
    token_budgets: tuple[int, ...]
    harnesses: tuple[Harness, ...]

    @property
    def name(self) -> str:
        """The unique name of its files: search8_8of4_8of4, search4@512_budgets128-512."""
        parts = [f"search{self.plan.search_traces}{_limit_suffix(self.plan.max_tokens)}"]
        for level in self.plan.levels:
            parts.append(f"{level.num_sets}of{level.set_size}{_limit_suffix(level.max_tokens)}")
        if self.token_budgets:
            parts.append("budgets" + "-".join(map(str, self.token_budgets)))
        return "_".join(parts)


def plan_samplings(config: Config) -> list[Sampling]:
    """Group the harnesses by what they sample. Raises ConfigError for what cannot be sampled."""
    harnesses = read_harnesses(config.eval.harnesses)
    max_response_tokens = config.rollout.sampling.max_response_tokens
    labels = [harness.label for harness in harnesses]
    if duplicates := sorted({label for label in labels if labels.count(label) > 1}):
        raise ConfigError(
            f"eval.harnesses: several are called {duplicates[0]!r}: give each a name of its own"
        )
    groups: dict[tuple[SamplingPlan, tuple[int, ...]], list[Harness]] = {}
    for harness in harnesses:
        plan = harness.sampling_plan(max_response_tokens)
        token_budgets = tuple(harness.token_budgets(max_response_tokens))
        _check_context(config, harness.label, plan)
        if token_budgets:
            _check_single_turn(config, harness.label)
        groups.setdefault((plan, token_budgets), []).append(harness)
    return [Sampling(plan, budgets, tuple(members)) for (plan, budgets), members in groups.items()]


def sample(
    sampling: Sampling,
    problems: Sequence[Problem],
    pipeline: Pipeline,
    grade: Callable[[Episode], GradedEpisode],
    store: Store,
    runtime: Runtime,
    *,
    chunk: int,
    seed: int,
) -> None:
    """Sample and grade every chunk of problems that `store` lacks. Collective.

    Seeds depend on run seed and problem only, so that all harnesses see the same first traces.
    Raises Interrupted.
    """
    for number, start in enumerate(range(0, len(problems), chunk)):
        if gather_objects(store.has(sampling.name, number))[0]:
            continue
        if runtime.is_main:
            store.remove_traces(sampling.name, number)
        pipeline.engine.reset_prefix_cache()
        tasks = [
            Task(problem, -1, (seed, "eval", problem.id))
            for problem in problems[start : start + chunk]
        ]
        episodes = pipeline.run(tasks)
        if pipeline.engine.replica.leader:
            store.write_traces(sampling.name, number, runtime.rank, episodes)
        by_rank = gather_objects([(episode.index, grade(episode)) for episode in episodes])
        if runtime.is_main:
            graded = [item for items in by_rank for item in items]
            graded.sort(key=lambda item: item[0])
            store.write(sampling.name, number, [each for _, each in graded])
        log.info(
            "%s: %d of %d problems", sampling.name, min(start + chunk, len(problems)), len(problems)
        )
    gather_objects(None)  # barrier: the main rank's records are on disk


class LongestRequest(NamedTuple):
    """The most tokens that a request of one level can come to, apart from the problem's prompt."""

    what: str
    traces: int
    response: int


def _check_context(config: Config, label: str, plan: SamplingPlan) -> None:
    """Check that the longest prompt and response of each level fit into the context."""
    max_context_tokens = config.rollout.sampling.max_context_tokens
    for request in _longest_requests(config, plan):
        total = config.data.max_prompt_tokens + request.traces + request.response
        if total > max_context_tokens:
            raise ConfigError(
                f"eval.harnesses: {label}: {request.what} may come to {total} tokens (problem "
                f"{config.data.max_prompt_tokens}, traces shown {request.traces}, response "
                f"{request.response}), more than rollout.sampling.max_context_tokens "
                f"({max_context_tokens}): raise it, lower the budget, shorten traces by "
                "prompts.view, or leave the harness out"
            )


def _longest_requests(config: Config, plan: SamplingPlan) -> Iterator[LongestRequest]:
    max_response_tokens = config.rollout.sampling.max_response_tokens
    response = plan.max_tokens or max_response_tokens
    yield LongestRequest("a response", 0, response)
    for level in plan.levels:
        shown = _shown_tokens(config, response)
        response = level.max_tokens or max_response_tokens
        yield LongestRequest(f"a set of {level.set_size}", level.set_size * shown, response)


def _shown_tokens(config: Config, trace_tokens: int) -> int:
    """Return how many of a trace's tokens a prompt shows at most; a final answer counts as none."""
    if config.prompts.view == "whole":
        return trace_tokens
    if config.prompts.view == "tail":
        return min(trace_tokens, config.prompts.tail_tokens or 0)
    return 0


def _check_single_turn(config: Config, label: str) -> None:
    environment = config.rollout.sampling.environment
    if environment is not None:
        raise ConfigError(
            f"eval.harnesses: {label}: token budgets are graded on responses of one turn, but "
            f"rollout.sampling.environment is {environment!r}: leave the harness out, or run one "
            "evaluation for each rollout.sampling.max_response_tokens"
        )


def _limit_suffix(max_tokens: int | None) -> str:
    return "" if max_tokens is None else f"@{max_tokens}"
