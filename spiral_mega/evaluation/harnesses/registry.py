"""The harnesses by kind, and what has to be sampled for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from spiral_mega.algorithm.sampling_plan import SamplingPlan
from spiral_mega.config import Config
from spiral_mega.config.harnesses import Sequential
from spiral_mega.errors import ConfigError
from spiral_mega.evaluation.graded_episode import GradedEpisode, Measure
from spiral_mega.evaluation.harnesses import best_of_n, majority, pass_at_k, pipeline, rsa, sequential

MODULES: dict[str, Any] = {
    "pass_at_k": pass_at_k,
    "majority": majority,
    "best_of_n": best_of_n,
    "sequential": sequential,
    "rsa": rsa,
    "pipeline": pipeline,
}


@dataclass(frozen=True, slots=True)
class Sampling:
    """Episodes to sample for one or more harnesses: their plan, and the budgets to judge search traces at."""

    plan: SamplingPlan
    cuts: tuple[int, ...]
    measures: tuple[Callable[[Sequence[GradedEpisode]], list[Measure]], ...]

    @property
    def name(self) -> str:
        """Names its files, and tells it from every other sampling: search8_8of4_8of4, search4@512_cut128-512."""
        parts = [f"search{self.plan.search_traces}{_limit(self.plan.max_tokens)}"]
        parts += [f"{level.sets}of{level.set_size}{_limit(level.max_tokens)}" for level in self.plan.levels]
        parts += ["cut" + "-".join(map(str, self.cuts))] if self.cuts else []
        return "_".join(parts)


def samplings(config: Config) -> list[Sampling]:
    """What the configuration's harnesses need; those of one plan share it. Raises ConfigError if it cannot be had."""
    harnesses, longest = config.eval.harnesses, config.rollout.sampling.max_response_tokens
    names = [harness.name or harness.kind for harness in harnesses]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"eval.harnesses: several are called {twice[0]!r}: give each a name of its own")
    found: dict[tuple[SamplingPlan, tuple[int, ...]], list[Callable[[Sequence[GradedEpisode]], list[Measure]]]] = {}
    for name, harness in zip(names, harnesses, strict=True):
        module = MODULES[harness.kind]
        plan = module.sampling_plan(harness, longest)
        _check_context(config, name, plan)
        if isinstance(harness, Sequential) and config.rollout.sampling.environment is not None:
            raise ConfigError(
                f"eval.harnesses: {name}: budgets are read off responses of one turn, but rollout.sampling.environment is "
                f"{config.rollout.sampling.environment!r}: leave the harness out, or evaluate each rollout.sampling.max_response_tokens"
            )
        cuts = tuple(sequential.budgets(harness, longest)) if isinstance(harness, Sequential) else ()

        def measure(
            graded: Sequence[GradedEpisode], module: Any = module, harness: Any = harness, plan: SamplingPlan = plan
        ) -> list[Measure]:
            return module.measure(harness, plan, graded, longest)

        found.setdefault((plan, cuts), []).append(measure)
    return [Sampling(plan, cuts, tuple(measures)) for (plan, cuts), measures in found.items()]


def _limit(max_tokens: int | None) -> str:
    return "" if max_tokens is None else f"@{max_tokens}"


def _check_context(config: Config, name: str, plan: SamplingPlan) -> None:
    """That the longest prompt and response of each level have room in rollout.sampling.max_context_tokens."""
    rollout, shown = config.rollout, 0
    before = plan.max_tokens or rollout.sampling.max_response_tokens
    needed = [("a response", 0, before)]
    for level in plan.levels:
        shown = {"whole": before, "tail": min(before, config.prompts.tail_tokens or 0)}.get(config.prompts.view, 0)
        before = level.max_tokens or rollout.sampling.max_response_tokens
        needed.append((f"a set of {level.set_size}", level.set_size * shown, before))
    for what, traces, response in needed:
        total = config.data.max_prompt_tokens + traces + response
        if total > rollout.sampling.max_context_tokens:
            raise ConfigError(
                f"eval.harnesses: {name}: {what} may come to {total} tokens (problem {config.data.max_prompt_tokens}, "
                f"traces shown {traces}, response {response}), more than rollout.sampling.max_context_tokens "
                f"({rollout.sampling.max_context_tokens}): raise it, lower the budget, shorten traces by prompts.view, or leave "
                "the harness out"
            )
