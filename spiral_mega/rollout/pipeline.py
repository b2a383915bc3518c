"""Search -> sets -> aggregation -> rewards for many problems over all ranks, without a barrier in between.

A problem belongs to a replica, which samples its search traces. A set is requested as soon as its last member ends: at
once on the same engine, unless another reads less context; then at the next exchange, on the one that reads the least.
Ranks exchange after a fixed number of engine steps, so that who does what follows from the work alone, and never from
the clock: the same seed and world size give the same run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from spiral_mega.algorithm.plan import Plan
from spiral_mega.config import AlgorithmConfig, RolloutConfig
from spiral_mega.distributed import exchange, gather_objects
from spiral_mega.environments import make_environment
from spiral_mega.heartbeat import beat
from spiral_mega.prompts import Prompter
from spiral_mega.rewards import Verifier
from spiral_mega.rollout.engine import Request, Sample, Sampler
from spiral_mega.rollout.episode_run import EpisodeRun, Recipe, Task
from spiral_mega.traces import Episode

log = logging.getLogger(__name__)

REPORT_S = 30.0  # between two lines of progress within a step
LATENESS = 32  # by default a trace of the longest kind spans so many exchanges


class Interrupted(Exception):
    """The run was asked to stop while episodes were being sampled; nothing of them is kept."""


class Feed(Protocol):
    """Where tasks come from. Every rank has one, and all of them decide alike."""

    def settle(self, episode: Episode) -> bool:
        """Assign credit to a whole episode, on its leader; whether it counts."""

    def next(self, settled: dict[int, bool]) -> list[Task] | None:
        """New tasks, now that these (by number in order of drawing) are settled; None to give up all unsettled ones."""


class Pipeline:
    """Turns tasks into episodes with rewards, by the algorithm's plan or another.

    `interrupted` is asked between exchanges whether to give up.
    """

    def __init__(
        self,
        engine: Sampler,
        prompter: Prompter,
        verifier: Verifier,
        tokenizer: PreTrainedTokenizerBase,
        algorithm: AlgorithmConfig,
        rollout: RolloutConfig,
        interrupted: Callable[[], bool] = lambda: False,
        plan: Plan | None = None,
    ) -> None:
        self.engine, self.algorithm, self.interrupted = engine, algorithm, interrupted
        plan, environment = plan or Plan.of(algorithm), make_environment(rollout)
        self.recipe = Recipe(prompter, verifier, tokenizer, plan, algorithm.set_order, rollout, environment)
        self.steps = rollout.exchange_steps or max(8, rollout.max_response_tokens // LATENESS)

    def run(self, tasks: Sequence[Task], *, aggregates: bool) -> list[tuple[int, Episode]]:
        """An episode for each of the tasks of all ranks; this rank returns those that it keeps, by task number.

        Collective: every rank gives the same tasks. Raises Interrupted on all of them when any was told to stop.
        """
        return self.stream(_Fixed(tasks), aggregates=aggregates)

    def stream(self, feed: Feed, *, aggregates: bool) -> list[tuple[int, Episode]]:
        """As `run`, of tasks that `feed` gives one after the other and may give up; each is numbered as it comes."""
        return _Stream(self, feed, aggregates).run()


class _Fixed:
    """The feed of a list of tasks."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = list(tasks)

    def settle(self, episode: Episode) -> bool:
        return True

    def next(self, settled: dict[int, bool]) -> list[Task]:
        tasks, self.tasks = self.tasks, []
        return tasks


@dataclass(slots=True)
class _InFlight:
    """A request on this engine: samples still to come, and the step of the engine at which it was added."""

    request: Request
    missing: int
    since: int


@dataclass(frozen=True, slots=True)
class _State:
    """What a rank tells the others at an exchange. `ready`: key and context of each set to be placed.

    `sampling`: some trace of its problems is missing; `busy`: some problem of its own is not settled.
    """

    stopped: bool
    load: int
    ready: list[tuple[tuple[Any, ...], int]]
    mail: bool
    settled: dict[int, bool]
    sampling: bool
    busy: bool


@dataclass
class _Stream:
    """One call of `Pipeline.stream` on this rank."""

    pipeline: Pipeline
    feed: Feed
    aggregates: bool
    drawn: int = 0
    now: int = 0  # steps of this engine
    runs: dict[int, EpisodeRun] = field(default_factory=dict)  # unsettled ones of this replica
    complete: list[int] = field(default_factory=list)  # sampled by the last exchange; their rewards are due at the next
    episodes: dict[int, Episode] = field(default_factory=dict)
    here: dict[tuple[Any, ...], _InFlight] = field(default_factory=dict)
    ready: list[Request] = field(default_factory=list)
    mail: list[Sample] = field(default_factory=list)  # sampled here for problems of other replicas
    others: float = float("inf")  # least load of another replica, as of the last exchange

    def __post_init__(self) -> None:
        self.engine, self.replica = self.pipeline.engine, self.pipeline.engine.replica

    def run(self) -> list[tuple[int, Episode]]:
        self._draw({})
        started = reported = time.monotonic()
        done = 0
        while True:
            limit = self.now + self.pipeline.steps
            while self.engine.has_unfinished() and self.now < limit:
                self.now += 1
                beat()
                for sample in self.engine.step():
                    done += 1
                    self._sampled(sample)
            if time.monotonic() - reported > REPORT_S:
                reported = time.monotonic()
                log.info("%d traces sampled in %.0f s, %d in progress", done, reported - started, self._in_progress())
            if not self._exchange():
                return sorted(self.episodes.items(), key=lambda each: each[0]) if self.replica.leader else []

    def _draw(self, settled: dict[int, bool]) -> bool:
        """Start what the feed gives next; whether it gave anything."""
        tasks = self.feed.next(settled)
        if tasks is None:
            self._give_up()
            return False
        for index, task in enumerate(tasks, self.drawn):
            if index % self.replica.count == self.replica.index:
                run = EpisodeRun(
                    self.pipeline.recipe, index, task, aggregates=self.aggregates, judged=self.replica.leader
                )
                self.runs[index] = run
                self._add(run.start())
        self.drawn += len(tasks)
        return bool(tasks)

    def _give_up(self) -> None:
        self.engine.abort(self.here.keys())
        for unfinished in (self.here, self.runs, self.ready, self.mail, self.complete):
            unfinished.clear()

    def _add(self, request: Request) -> None:
        self.here[request.key] = _InFlight(request, request.num_samples, self.now)
        self.engine.add(request)

    def _sampled(self, sample: Sample) -> None:
        flight = self.here[sample.key]
        flight.missing -= 1
        if not flight.missing:
            del self.here[sample.key]
        if sample.key[0] % self.replica.count == self.replica.index:
            self._receive(sample)
        else:
            self.mail.append(sample)

    def _receive(self, sample: Sample) -> None:
        for request in self.runs[sample.key[0]].receive(sample):
            if self._load() <= self.others:
                self._add(request)
            else:
                self.ready.append(request)

    def _load(self) -> int:
        """Tokens of context that a step of this engine reads, about."""
        return sum(each.missing * (len(each.request.prompt_ids) + self.now - each.since) for each in self.here.values())

    def _in_progress(self) -> int:
        return sum(each.missing for each in self.here.values())

    def _exchange(self) -> bool:
        """Settle, place sets, send, and draw more; whether anything is left to do. Collective."""
        settled = {index: self._settle(index) for index in self.complete}
        self.complete = [index for index, run in self.runs.items() if run.complete()]
        ready = [(request.key, request.num_samples * len(request.prompt_ids)) for request in self.ready]
        state = _State(
            stopped=self.pipeline.interrupted(),
            load=self._load(),
            ready=ready,
            mail=bool(self.mail),
            settled=settled,
            sampling=len(self.complete) < len(self.runs),
            busy=bool(self.runs),
        )
        told = gather_objects(state)
        if any(each.stopped for each in told) and any(each.sampling for each in told):
            self._give_up()
            raise Interrupted
        states = [told[self.replica.ranks(index)[0]] for index in range(self.replica.count)]
        loads = [each.load for each in states]
        places = place([item for each in states for item in each.ready], loads)
        if places or any(each.mail for each in states):
            self._send(places)
        self.others = min((load for i, load in enumerate(loads) if i != self.replica.index), default=float("inf"))
        started = self._draw({index: flag for each in states for index, flag in each.settled.items()})
        return started or any(each.busy for each in states)

    def _settle(self, index: int) -> bool:
        run = self.runs.pop(index)
        if not self.replica.leader:
            return False
        self.episodes[index] = run.finish()
        return self.feed.settle(self.episodes[index])

    def _send(self, places: dict[tuple[Any, ...], int]) -> None:
        """Requests to where they were placed, samples to where their problem is."""
        count = self.replica.count
        letters: list[tuple[int, Request | Sample]] = [(places[request.key], request) for request in self.ready]
        letters += [(sample.key[0] % count, sample) for sample in self.mail]
        outgoing: list[list[Request | Sample]] = [[] for _ in range(count * self.replica.size)]
        if self.replica.leader:
            for to, letter in letters:
                for rank in self.replica.ranks(to) if to != self.replica.index else ():
                    outgoing[rank].append(letter)
        kept = [request for request in self.ready if places[request.key] == self.replica.index]
        self.ready, self.mail = [], []
        for letter in [*exchange(outgoing), *kept]:
            if isinstance(letter, Request):
                self._add(letter)
            else:
                self._receive(letter)


def place(ready: Sequence[tuple[tuple[Any, ...], int]], loads: list[int]) -> dict[tuple[Any, ...], int]:
    """Where each set goes: in order, to the engine that reads the least.

    `ready` has keys and tokens of context to read; `loads`, the tokens that each engine reads, are brought up to date.
    """
    places = {}
    for key, tokens in ready:
        places[key] = loads.index(min(loads))
        loads[places[key]] += tokens
    return places
