"""Builds an episode from samples: search traces, then each set once its members have finished.

    first_request() -> samples of the problem ---+
                                                 v
    requests  <-----------------------------  add_sample()  ->  verifier (once for each trace)
      next turn of the trace, if the environment replied        |
      sets whose last member has just finished                  v
                                              build(), once is_complete()

Everything that is random follows from the task's seed parts: an episode is the same whoever samples
it, in any order.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from spiral_mega.algorithm.sampling_plan import SamplingPlan, SetSpec
from spiral_mega.algorithm.sets import SetOrder
from spiral_mega.config import RolloutConfig
from spiral_mega.environments import Environment
from spiral_mega.prompts.prompter import Prompter
from spiral_mega.rewards import Verdict, VerifierPool
from spiral_mega.rollout.conversation import Conversation
from spiral_mega.rollout.engine import Request, RequestKey, Sample
from spiral_mega.seeds import derive_seed
from spiral_mega.telemetry import warn_once
from spiral_mega.traces import SEARCH, Episode, Problem, Trace

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Task:
    """A problem to sample an episode for; no other episode of the run has its `seed_parts`."""

    problem: Problem
    step: int
    seed_parts: tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class SamplingContext:
    """What all episodes are sampled with."""

    prompter: Prompter
    verifier: VerifierPool
    tokenizer: PreTrainedTokenizerBase
    plan: SamplingPlan
    set_order: SetOrder
    rollout: RolloutConfig
    environment: Environment | None = None


class EpisodeBuilder:
    """Turns samples into an episode, and returns the requests that each sample makes possible.

    `verify_rewards`: submit traces to the verifier; of the ranks of a replica, which all build the
    same episode, only the leader does.
    """

    def __init__(
        self, context: SamplingContext, index: int, task: Task, *, verify_rewards: bool
    ) -> None:
        self.context, self.index, self.task, self.verify_rewards = (
            context,
            index,
            task,
            verify_rewards,
        )
        plan = context.plan
        rng = np.random.default_rng(derive_seed(*task.seed_parts, "sets"))
        self.sets: list[SetSpec] = plan.draw_sets(rng, context.set_order)
        self.unrequested_sets = set(range(len(self.sets))) if plan.aggregation_traces else set()
        search_prompt = context.prompter.search_prompt(task.problem)
        self.prompts: dict[int | None, list[int]] = {None: search_prompt}  # by set index
        self.conversations: dict[RequestKey, Conversation] = {}  # of unfinished traces
        self.search: dict[int, Trace] = {}
        self.aggregation: list[dict[int, Trace]] = [{} for _ in self.sets]
        self.verdicts: list[tuple[Trace, Future[Verdict]]] = []

    def first_request(self) -> Request:
        """Return the request for all search traces."""
        return self._first_turns(SEARCH, None, self.context.plan.search_traces)

    def add_sample(self, sample: Sample) -> list[Request]:
        """Record a turn; return the trace's next turn, or the sets that its last turn completes."""
        trace_key = sample.trace_key
        conversation = self.conversations.get(trace_key) or self._start_conversation(trace_key)
        text = self.context.tokenizer.decode(sample.token_ids, skip_special_tokens=True)
        conversation.add_turn(sample, text)
        next_turn = self._next_turn(conversation)
        if next_turn is not None:
            return [next_turn]
        del self.conversations[trace_key]
        self._finish_trace(conversation.trace)
        return self._request_ready_sets()

    def is_complete(self) -> bool:
        """Whether every trace has finished; rewards may still be pending."""
        plan = self.context.plan
        if len(self.search) < plan.search_traces:
            return False
        return all(len(answers) == plan.aggregation_traces for answers in self.aggregation)

    def build(self) -> Episode:
        """Return the complete episode; waits for its rewards."""
        for trace, verdict in self.verdicts:
            self._apply_verdict(trace, verdict.result())
        aggregates = self.context.plan.aggregation_traces > 0
        return Episode(
            problem=self.task.problem,
            step=self.task.step,
            search=_in_order(self.search),
            sets=[spec.members for spec in self.sets],
            aggregation=[_in_order(answers) for answers in self.aggregation] if aggregates else [],
            index=self.index,
        )

    def _start_conversation(self, trace_key: RequestKey) -> Conversation:
        _, component, set_index, trace_index, _ = trace_key
        assert trace_index is not None
        trace = Trace(
            component, trace_index, self.prompts[set_index], [], [], "stop", "", set_index
        )
        conversation = Conversation(trace, list(self.task.problem.messages))
        self.conversations[trace_key] = conversation
        return conversation

    def _next_turn(self, conversation: Conversation) -> Request | None:
        """Ask the environment; return the trace's next turn, or None if the trace has ended."""
        environment, trace = self.context.environment, conversation.trace
        if (
            environment is None
            or trace.finish != "stop"
            or conversation.turns >= environment.max_turns
        ):
            return None
        replies = environment.reply(self.task.problem, conversation.messages)
        if not replies:
            return None
        reply_ids = self.context.prompter.reply_ids(replies, end_id=trace.response_ids[-1])
        remaining = self._max_tokens(trace.set_index) - len(trace.response_ids) - len(reply_ids)
        if remaining < 1:
            trace.finish = "length"
            return None
        conversation.add_replies(replies, reply_ids)
        return self._turn_request(trace, conversation.turns, remaining)

    def _turn_request(self, trace: Trace, turn: int, max_tokens: int) -> Request:
        key = RequestKey(self.index, trace.component, trace.set_index, trace.index, turn)
        prompt = [*trace.prompt_ids, *trace.response_ids]
        _, *turn_parts = key
        seed = derive_seed(*self.task.seed_parts, "turn", *map(str, turn_parts))
        return Request(key, prompt, 1, seed, max_tokens, priority=-len(prompt))

    def _finish_trace(self, trace: Trace) -> None:
        traces = self.search if trace.set_index is None else self.aggregation[trace.set_index]
        traces[trace.index] = trace
        if self.verify_rewards:
            problem = self.task.problem
            verdict = self.context.verifier.submit(
                trace.answer_text, problem.answer, problem.verifier
            )
            self.verdicts.append((trace, verdict))

    def _request_ready_sets(self) -> list[Request]:
        """Return the requests of all sets whose members have finished.

        A set whose prompt leaves no room is finished at once, which may complete sets of the next
        level.
        """
        requests: list[Request] = []
        while ready_sets := [
            each for each in sorted(self.unrequested_sets) if self._has_members(each)
        ]:
            self.unrequested_sets.difference_update(ready_sets)
            for set_index in ready_sets:
                request = self._set_request(set_index)
                if request is not None:
                    requests.append(request)
        return requests

    def _has_members(self, set_index: int) -> bool:
        return all(self._trace(position) is not None for position in self.sets[set_index].members)

    def _trace(self, position: int) -> Trace | None:
        """Return the trace at a position of `Episode.traces()`, if it has finished."""
        plan = self.context.plan
        if position < plan.search_traces:
            return self.search.get(position)
        set_index, index = divmod(position - plan.search_traces, plan.aggregation_traces)
        return self.aggregation[set_index].get(index)

    def _set_request(self, set_index: int) -> Request | None:
        """Return the request for a set's answers, or None if its prompt fills the context."""
        context, spec = self.context, self.sets[set_index]
        traces = [self._trace(position) for position in spec.members]
        members = [trace for trace in traces if trace is not None]
        prompt = context.prompter.aggregation_prompt(self.task.problem, members)
        self.prompts[set_index] = prompt
        count, component = context.plan.aggregation_traces, spec.component
        if len(prompt) < context.rollout.sampling.max_context_tokens:
            return self._first_turns(component, set_index, count)
        # The answers exist but are empty, and count as truncated. They score 0 without being
        # verified.
        self.aggregation[set_index] = {
            index: Trace(component, index, prompt, [], [], "length", "", set_index)
            for index in range(count)
        }
        return None

    def _first_turns(self, component: str, set_index: int | None, count: int) -> Request:
        """Return the request for the first turn of all traces that answer a set, or the problem."""
        prompt = self.prompts[set_index]
        return Request(
            key=RequestKey(self.index, component, set_index),
            prompt_ids=prompt,
            num_samples=count,
            seed=derive_seed(
                *self.task.seed_parts, component, -1 if set_index is None else set_index
            ),
            max_tokens=self._max_tokens(set_index),
            # Answers before searches, as they are nearest to their end; longest prompts first, as
            # they take longest.
            priority=0 if component == SEARCH else -len(prompt),
        )

    def _max_tokens(self, set_index: int | None) -> int:
        """Return the most tokens that a response may have, replies of the environment included."""
        sampling = self.context.rollout.sampling
        limit = (
            self.context.plan.max_tokens if set_index is None else self.sets[set_index].max_tokens
        )
        context_left = sampling.max_context_tokens - len(self.prompts[set_index])
        return min(limit or sampling.max_response_tokens, context_left)

    def _apply_verdict(self, trace: Trace, verdict: Verdict) -> None:
        trace.reward, trace.verification = verdict.reward, verdict.status
        if verdict.status != "ok":
            problem = self.task.problem.id
            warn_once(
                log,
                "verification of a response to %s: %s %s",
                problem,
                verdict.status,
                verdict.detail,
            )


def _in_order(traces: dict[int, Trace]) -> list[Trace]:
    return [traces[index] for index in sorted(traces)]
