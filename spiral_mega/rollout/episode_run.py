"""One episode in the making: search requests, each set's request when its members are there, rewards on the way."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from spiral_mega.algorithm.plan import Plan
from spiral_mega.config import RolloutConfig
from spiral_mega.prompts import Prompter
from spiral_mega.rewards import Verdict, Verifier
from spiral_mega.rollout.engine import Request, Sample
from spiral_mega.seeds import derive_seed
from spiral_mega.telemetry import warn_once
from spiral_mega.traces import SEARCH, Episode, Problem, Trace

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Task:
    """A problem to sample an episode for. `seed_parts` tell this episode from every other of the run."""

    problem: Problem
    step: int
    seed_parts: tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class Recipe:
    """What all episodes are made with."""

    prompter: Prompter
    verifier: Verifier
    tokenizer: PreTrainedTokenizerBase
    plan: Plan
    rollout: RolloutConfig


class EpisodeRun:
    """Takes samples and says what to request next. Keys of requests are (index, component, set index).

    `judged` tells whether its rewards are wanted here: of the ranks of a replica, one asks the verifier.
    """

    def __init__(self, recipe: Recipe, index: int, task: Task, *, aggregates: bool, judged: bool) -> None:
        self.recipe, self.index, self.task, self.judged = recipe, index, task, judged
        rng = np.random.default_rng(derive_seed(*task.seed_parts, "sets"))
        self.sets = recipe.plan.draw_sets(rng) if aggregates else []
        self.search: dict[int, Trace] = {}
        self.aggregation: list[dict[int, Trace]] = [{} for _ in self.sets]
        self.waiting = set(range(len(self.sets))) if recipe.plan.answers else set()
        self.verdicts: list[tuple[Trace, Future[Verdict]]] = []
        self.prompts: dict[int | None, list[int]] = {None: recipe.prompter.search_prompt(task.problem)}

    def start(self) -> Request:
        """The request for all search traces."""
        return self._request(SEARCH, None, self.recipe.plan.search_traces)

    def receive(self, sample: Sample) -> list[Request]:
        """Take a trace; the requests of the sets that it completes."""
        _, component, set_index = sample.key
        trace = Trace(
            component=component,
            index=sample.index,
            set_index=set_index,
            prompt_ids=self.prompts[set_index],
            response_ids=sample.token_ids,
            logprobs=sample.logprobs,
            finish=sample.finish,
            text=self.recipe.tokenizer.decode(sample.token_ids, skip_special_tokens=True),
            cached_tokens=sample.cached_tokens,
        )
        (self.search if set_index is None else self.aggregation[set_index])[trace.index] = trace
        if self.judged:
            problem = self.task.problem
            self.verdicts.append((trace, self.recipe.verifier.submit(trace.text, problem.answer, problem.kind)))
        requests: list[Request] = []
        while ready := [l for l in sorted(self.waiting) if all(map(self._trace, self.sets[l]))]:
            self.waiting.difference_update(ready)
            requests += [request for l in ready if (request := self._aggregate(l)) is not None]
        return requests

    def complete(self) -> bool:
        """Whether every trace is there; rewards may still be on their way."""
        plan = self.recipe.plan
        return len(self.search) == plan.search_traces and all(len(group) == plan.answers for group in self.aggregation)

    def finish(self) -> Episode:
        """The episode; waits for its rewards."""
        for trace, future in self.verdicts:
            verdict = future.result()
            trace.reward, trace.verification = verdict.reward, verdict.status
            if verdict.status != "ok":
                warn_once(
                    log, "verification of a response to %s: %s %s", self.task.problem.id, verdict.status, verdict.detail
                )
        search, *aggregation = ([group[i] for i in sorted(group)] for group in (self.search, *self.aggregation))
        aggregation = aggregation if self.recipe.plan.answers else []
        return Episode(self.task.problem, self.task.step, search, self.sets, aggregation)

    def _trace(self, position: int) -> Trace | None:
        """The trace at a position of `Episode.traces()`, once it is there."""
        if position < self.recipe.plan.search_traces:
            return self.search.get(position)
        set_index, index = divmod(position - self.recipe.plan.search_traces, self.recipe.plan.answers)
        return self.aggregation[set_index].get(index)

    def _aggregate(self, set_index: int) -> Request | None:
        members = [trace for position in self.sets[set_index] if (trace := self._trace(position)) is not None]
        prompt = self.recipe.prompter.aggregation_prompt(self.task.problem, members)
        self.prompts[set_index] = prompt
        count, component = self.recipe.plan.answers, self.recipe.plan.component(set_index)
        if len(prompt) < self.recipe.rollout.max_context_tokens:
            return self._request(component, set_index, count)
        # No room to answer: the traces exist, empty, and count as cut. Nothing was answered, so they score 0 unseen.
        self.aggregation[set_index] = {
            i: Trace(component, i, prompt, [], [], "length", "", set_index) for i in range(count)
        }
        return None

    def _request(self, component: str, set_index: int | None, count: int) -> Request:
        rollout, prompt = self.recipe.rollout, self.prompts[set_index]
        limit = self.recipe.plan.limit(set_index) or rollout.max_response_tokens
        return Request(
            key=(self.index, component, set_index),
            prompt_ids=prompt,
            num_samples=count,
            seed=derive_seed(*self.task.seed_parts, component, -1 if set_index is None else set_index),
            max_tokens=min(limit, rollout.max_context_tokens - len(prompt)),
            # What is nearest to its end goes first, and of sets the one that takes longest to read.
            priority=0 if component == SEARCH else -len(prompt),
        )
