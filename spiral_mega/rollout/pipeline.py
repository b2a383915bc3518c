"""Search -> sets -> aggregation -> rewards for a list of problems, streamed: a set starts when its traces are done."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from spiral_mega.algorithm.sets import sample_sets
from spiral_mega.config import AlgorithmConfig, RolloutConfig
from spiral_mega.distributed import gather_objects
from spiral_mega.prompts import Prompter
from spiral_mega.rewards import Verdict, Verifier
from spiral_mega.rollout.engine import Request, RolloutEngine, Sample
from spiral_mega.seeds import derive_seed
from spiral_mega.telemetry import warn_once
from spiral_mega.traces import AGGREGATION, SEARCH, Episode, Problem, Trace

log = logging.getLogger(__name__)

REPORT_S = 30.0  # between two lines of progress within a step


class Interrupted(Exception):
    """The run was asked to stop while episodes were being sampled; nothing of them is kept."""


@dataclass(frozen=True, slots=True)
class Task:
    """A problem to sample an episode for. `seed_parts` tell this episode from every other of the run."""

    problem: Problem
    step: int
    seed_parts: tuple[int | str, ...]


class Pipeline:
    """Turns tasks into episodes with rewards, on this rank's engine. Credit is assigned elsewhere.

    `interrupted` is asked between engine steps whether to give up.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        prompter: Prompter,
        verifier: Verifier,
        tokenizer: PreTrainedTokenizerBase,
        algorithm: AlgorithmConfig,
        rollout: RolloutConfig,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        self.engine, self.prompter, self.verifier, self.tokenizer = engine, prompter, verifier, tokenizer
        self.algorithm, self.rollout = algorithm, rollout
        self.interrupted = interrupted

    def run(self, tasks: Sequence[Task], *, aggregates: bool) -> list[tuple[int, Episode]]:
        """An episode for each of the tasks of all ranks; this rank returns those that it keeps, by task number.

        Collective: every rank gives the same tasks. Raises Interrupted on all of them when any was told to stop.
        """
        replica = self.engine.replica
        mine = range(replica.index, len(tasks), replica.count)
        runs = {index: _EpisodeRun(self, index, tasks[index], aggregates) for index in mine}
        for run in runs.values():
            run.start()
        stopped = False
        started = reported = time.monotonic()
        done = 0
        while self.engine.has_unfinished() and not (stopped := replica.any(self.interrupted())):
            for sample in self.engine.step():
                runs[sample.key[0]].receive(sample)
                done += 1
            if time.monotonic() - reported > REPORT_S:
                reported = time.monotonic()
                log.info("%d traces of %d problems sampled in %.0f s", done, len(mine), reported - started)
        if any(gather_objects(stopped)):
            raise Interrupted
        return [(index, run.finish()) for index, run in runs.items()] if replica.leader else []


class _EpisodeRun:
    """One episode in the making. Request keys are (index, component, set index)."""

    def __init__(self, pipeline: Pipeline, index: int, task: Task, aggregates: bool) -> None:
        self.pipeline, self.index, self.task = pipeline, index, task
        algorithm = pipeline.algorithm
        self.sets: list[tuple[int, ...]] = []
        if aggregates:
            rng = np.random.default_rng(derive_seed(*task.seed_parts, "sets"))
            self.sets = sample_sets(
                algorithm.search_traces, algorithm.set_size, algorithm.num_sets, rng=rng, method=algorithm.set_design
            )
        self.search: dict[int, Trace] = {}
        self.aggregation: list[dict[int, Trace]] = [{} for _ in self.sets]
        self.waiting = set(range(len(self.sets)))
        self.verdicts: list[tuple[Trace, Future[Verdict]]] = []
        self.prompts: dict[int | None, list[int]] = {}

    def start(self) -> None:
        prompt = self.pipeline.prompter.search_prompt(self.task.problem)
        self._request(SEARCH, None, prompt, self.pipeline.algorithm.search_traces)

    def receive(self, sample: Sample) -> None:
        _, component, set_index = sample.key
        trace = Trace(
            component=component,
            index=sample.index,
            set_index=set_index,
            prompt_ids=self.prompts[set_index],
            response_ids=sample.token_ids,
            logprobs=sample.logprobs,
            finish=sample.finish,
            text=self.pipeline.tokenizer.decode(sample.token_ids, skip_special_tokens=True),
        )
        self._store(trace)
        if component == SEARCH:
            for l in sorted(self.waiting):
                if all(j in self.search for j in self.sets[l]):
                    self.waiting.remove(l)
                    self._aggregate(l)

    def finish(self) -> Episode:
        for trace, future in self.verdicts:
            verdict = future.result()
            trace.reward, trace.verification = verdict.reward, verdict.status
            if verdict.status != "ok":
                warn_once(
                    log, "verification of a response to %s: %s %s", self.task.problem.id, verdict.status, verdict.detail
                )
        search, *aggregation = ([group[i] for i in sorted(group)] for group in (self.search, *self.aggregation))
        return Episode(self.task.problem, self.task.step, search, self.sets, aggregation)

    def _aggregate(self, set_index: int) -> None:
        members = [self.search[j] for j in self.sets[set_index]]
        prompt = self.pipeline.prompter.aggregation_prompt(self.task.problem, members)
        count = self.pipeline.algorithm.aggregation_traces
        if len(prompt) < self.pipeline.rollout.max_context_tokens:
            self._request(AGGREGATION, set_index, prompt, count)
            return
        # No room to answer: the traces exist, empty, and count as cut. Nothing was answered, so they score 0 unseen.
        self.aggregation[set_index] = {
            i: Trace(AGGREGATION, i, prompt, [], [], "length", "", set_index) for i in range(count)
        }

    def _request(self, component: str, set_index: int | None, prompt: list[int], count: int) -> None:
        rollout = self.pipeline.rollout
        self.prompts[set_index] = prompt
        self.pipeline.engine.add(
            Request(
                key=(self.index, component, set_index),
                prompt_ids=prompt,
                num_samples=count,
                seed=derive_seed(*self.task.seed_parts, component, -1 if set_index is None else set_index),
                max_tokens=min(rollout.max_response_tokens, rollout.max_context_tokens - len(prompt)),
            )
        )

    def _store(self, trace: Trace) -> None:
        group = self.search if trace.set_index is None else self.aggregation[trace.set_index]
        group[trace.index] = trace
        if self.pipeline.engine.replica.leader:
            problem = self.task.problem
            self.verdicts.append((trace, self.pipeline.verifier.submit(trace.text, problem.answer, problem.kind)))
