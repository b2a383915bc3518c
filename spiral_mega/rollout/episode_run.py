"""One episode in the making: search requests, each set's request when its members are there, rewards on the way."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from spiral_mega.algorithm.sampling_plan import SamplingPlan
from spiral_mega.algorithm.sets import SetOrder
from spiral_mega.config import RolloutConfig
from spiral_mega.environments import Environment
from spiral_mega.prompts.prompter import Prompter
from spiral_mega.rewards import Verdict, VerifierPool
from spiral_mega.rollout.conversation import Conversation
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
    verifier: VerifierPool
    tokenizer: PreTrainedTokenizerBase
    plan: SamplingPlan
    set_order: SetOrder
    rollout: RolloutConfig
    environment: Environment | None = None


class EpisodeRun:
    """Takes samples and says what to request next. Keys of requests are (index, component, set index), and for the
    later turns of a trace also its index and how many turns went before.

    `judged` tells whether its rewards are wanted here: of the ranks of a replica, one asks the verifier.
    """

    def __init__(self, recipe: Recipe, index: int, task: Task, *, aggregates: bool, judged: bool) -> None:
        self.recipe, self.index, self.task, self.judged = recipe, index, task, judged
        rng = np.random.default_rng(derive_seed(*task.seed_parts, "sets"))
        self.sets = recipe.plan.draw_sets(rng, recipe.set_order) if aggregates else []
        self.open: dict[tuple[int | None, int], Conversation] = {}
        self.search: dict[int, Trace] = {}
        self.aggregation: list[dict[int, Trace]] = [{} for _ in self.sets]
        self.waiting = set(range(len(self.sets))) if recipe.plan.aggregation_traces else set()
        self.verdicts: list[tuple[Trace, Future[Verdict]]] = []
        self.prompts: dict[int | None, list[int]] = {None: recipe.prompter.search_prompt(task.problem)}

    def start(self) -> Request:
        """The request for all search traces."""
        return self._request(SEARCH, None, self.recipe.plan.search_traces)

    def receive(self, sample: Sample) -> list[Request]:
        """Take a turn; the request of the trace's next one or, at its end, those of the sets that it completes."""
        _, component, set_index, *turn = sample.key
        place = set_index, turn[0] if turn else sample.index
        if place not in self.open:
            begun = Trace(component, place[1], self.prompts[set_index], [], [], "stop", "", set_index)
            self.open[place] = Conversation(begun, list(self.task.problem.messages))
        self.open[place].add_turn(sample, self.recipe.tokenizer.decode(sample.token_ids, skip_special_tokens=True))
        if (request := self._next_turn(self.open[place])) is not None:
            return [request]
        trace = self.open.pop(place).trace
        (self.search if set_index is None else self.aggregation[set_index])[trace.index] = trace
        if self.judged:
            problem = self.task.problem
            self.verdicts.append(
                (trace, self.recipe.verifier.submit(trace.answer_text, problem.answer, problem.verifier))
            )
        requests: list[Request] = []
        while ready := [l for l in sorted(self.waiting) if all(map(self._trace, self.sets[l].members))]:
            self.waiting.difference_update(ready)
            requests += [request for l in ready if (request := self._aggregate(l)) is not None]
        return requests

    def complete(self) -> bool:
        """Whether every trace is there; rewards may still be on their way."""
        plan = self.recipe.plan
        return len(self.search) == plan.search_traces and all(
            len(group) == plan.aggregation_traces for group in self.aggregation
        )

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
        aggregation = aggregation if self.recipe.plan.aggregation_traces else []
        sets = [spec.members for spec in self.sets]
        return Episode(self.task.problem, self.task.step, search, sets, aggregation, index=self.index)

    def _trace(self, position: int) -> Trace | None:
        """The trace at a position of `Episode.traces()`, once it is there."""
        if position < self.recipe.plan.search_traces:
            return self.search.get(position)
        set_index, index = divmod(position - self.recipe.plan.search_traces, self.recipe.plan.aggregation_traces)
        return self.aggregation[set_index].get(index)

    def _next_turn(self, talk: Conversation) -> Request | None:
        """What the model is to write after the environment's reply; None if the trace is at its end."""
        environment, trace = self.recipe.environment, talk.trace
        if environment is None or trace.finish != "stop" or talk.turns >= environment.max_turns:
            return None
        replies = environment.reply(self.task.problem, talk.messages)
        if not replies:
            return None
        token_ids = self.recipe.prompter.reply_ids(replies, end_id=trace.response_ids[-1])
        room = self._most_tokens(trace.set_index) - len(trace.response_ids) - len(token_ids)
        if room < 1:
            trace.finish = "length"
            return None
        talk.add_replies(replies, token_ids)
        key = (self.index, trace.component, trace.set_index, trace.index, talk.turns)
        prompt = [*trace.prompt_ids, *trace.response_ids]
        seed = derive_seed(*self.task.seed_parts, "turn", *map(str, key[1:]))
        return Request(key, prompt, 1, seed, max_tokens=room, priority=-len(prompt), component=trace.component)

    def _most_tokens(self, set_index: int | None) -> int:
        """The longest response, in tokens."""
        rollout = self.recipe.rollout
        limit = self.recipe.plan.max_tokens if set_index is None else self.sets[set_index].max_tokens
        limit = limit or rollout.sampling.max_response_tokens
        return min(limit, rollout.sampling.max_context_tokens - len(self.prompts[set_index]))

    def _aggregate(self, set_index: int) -> Request | None:
        members = [trace for position in self.sets[set_index].members if (trace := self._trace(position)) is not None]
        prompt = self.recipe.prompter.aggregation_prompt(self.task.problem, members)
        self.prompts[set_index] = prompt
        count, component = self.recipe.plan.aggregation_traces, self.sets[set_index].component
        if len(prompt) < self.recipe.rollout.sampling.max_context_tokens:
            return self._request(component, set_index, count)
        # No room to answer: the traces exist, empty, and count as cut. Nothing was answered, so they score 0 unseen.
        self.aggregation[set_index] = {
            i: Trace(component, i, prompt, [], [], "length", "", set_index) for i in range(count)
        }
        return None

    def _request(self, component: str, set_index: int | None, count: int) -> Request:
        prompt = self.prompts[set_index]
        return Request(
            key=(self.index, component, set_index),
            prompt_ids=prompt,
            num_samples=count,
            seed=derive_seed(*self.task.seed_parts, component, -1 if set_index is None else set_index),
            max_tokens=self._most_tokens(set_index),
            # What is nearest to its end goes first, and of sets the one that takes longest to read.
            priority=0 if component == SEARCH else -len(prompt),
            component=component,
        )
