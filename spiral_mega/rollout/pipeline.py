"""Search -> sets -> aggregation -> rewards for many problems over all ranks, without a barrier in between.

A problem belongs to a replica, which samples its search traces. A set is requested as soon as its last member ends: at
once on the same engine, unless another reads less context; then by way of an exchange, on the one that reads the least.
Ranks exchange after a fixed number of engine steps, so that who does what follows from the work alone, and never from
the clock: the same seed and world size give the same run. Nobody waits at an exchange: engines go on meanwhile, and
what it brings is taken up a fixed number of exchanges later.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from spiral_mega.algorithm.sampling_plan import SamplingPlan
from spiral_mega.config import AlgorithmConfig, RolloutConfig
from spiral_mega.distributed.background import BackgroundCollectives
from spiral_mega.distributed.collectives import all_to_all_objects, gather_objects
from spiral_mega.environments import make_environment
from spiral_mega.process.heartbeat import heartbeat
from spiral_mega.prompts.prompter import Prompter
from spiral_mega.rewards import VerifierPool
from spiral_mega.rollout.engine import Request, Sample, Sampler
from spiral_mega.rollout.episode_run import EpisodeRun, Recipe, Task
from spiral_mega.traces import Episode

log = logging.getLogger(__name__)

REPORT_S = 30.0  # between two lines of progress within a step
LATENESS = 64  # by default a trace of the longest kind spans so many exchanges
LAG = 2  # what an exchange brings is taken up so many exchanges later: how far engines may be apart


def exchange_steps(rollout: RolloutConfig) -> int:
    """Engine steps between two exchanges."""
    return rollout.engine.exchange_steps or max(8, rollout.sampling.max_response_tokens // LATENESS)


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

    `interrupted` is asked between exchanges whether to give up. Making one is collective.
    """

    def __init__(
        self,
        engine: Sampler,
        prompter: Prompter,
        verifier: VerifierPool,
        tokenizer: PreTrainedTokenizerBase,
        algorithm: AlgorithmConfig,
        rollout: RolloutConfig,
        interrupted: Callable[[], bool] = lambda: False,
        plan: SamplingPlan | None = None,
    ) -> None:
        self.engine, self.algorithm, self.interrupted = engine, algorithm, interrupted
        plan, environment = plan or SamplingPlan.from_algorithm(algorithm), make_environment(rollout.sampling)
        self.recipe = Recipe(prompter, verifier, tokenizer, plan, algorithm.set_order, rollout, environment)
        self.steps = exchange_steps(rollout)
        self.lag = LAG if engine.replica.count > 1 else 0
        self.group = dist.new_group(backend="gloo")  # of the exchanges, which run beside the engines' own collectives

    def run(self, tasks: Sequence[Task], *, aggregates: bool) -> list[Episode]:
        """An episode for each of the tasks of all ranks; this rank returns those that it keeps, in order of `index`.

        Collective: every rank gives the same tasks. Raises Interrupted on all of them when any was told to stop.
        """
        return self.stream(_Fixed(tasks), aggregates=aggregates)

    def stream(self, feed: Feed, *, aggregates: bool) -> list[Episode]:
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

    `sampling`: some trace of its problems is missing.
    """

    stopped: bool
    load: int
    ready: list[tuple[tuple[Any, ...], int]]
    mail: bool
    settled: dict[int, bool]
    sampling: bool


@dataclass(frozen=True, slots=True)
class _News:
    """What an exchange brings to a rank: what all told, and what came here. `others`: see `_Stream`."""

    told: list[_State]
    letters: list[Request | Sample]
    others: float


@dataclass
class _Stream:
    """One call of `Pipeline.stream` on this rank."""

    pipeline: Pipeline
    feed: Feed
    aggregates: bool
    drawn: int = 0
    unsettled: int = 0  # of those drawn, by what all ranks know
    now: int = 0  # steps of this engine
    runs: dict[int, EpisodeRun] = field(default_factory=dict)  # unsettled ones of this replica
    complete: list[int] = field(default_factory=list)  # sampled by the last exchange; their rewards are due at the next
    episodes: dict[int, Episode] = field(default_factory=dict)
    here: dict[tuple[Any, ...], _InFlight] = field(default_factory=dict)
    ready: list[Request] = field(default_factory=list)
    mail: list[Sample] = field(default_factory=list)  # sampled here for problems of other replicas
    others: float = float("inf")  # least load of another replica, as of the exchange last taken up
    interrupted: bool = False

    def __post_init__(self) -> None:
        self.engine, self.replica = self.pipeline.engine, self.pipeline.engine.replica
        # Of the last exchanges: context placed on each replica, which the load that it tells does not show yet.
        self.placed: deque[list[int]] = deque(maxlen=self.pipeline.lag)

    def run(self) -> list[Episode]:
        self._draw({})
        started = reported = time.monotonic()
        done = 0
        with BackgroundCollectives() as beside:
            while True:
                limit = self.now + self.pipeline.steps
                while self.engine.has_unfinished() and self.now < limit:
                    self.now += 1
                    heartbeat()
                    for sample in self.engine.step():
                        done += 1
                        self._sampled(sample)
                if time.monotonic() - reported > REPORT_S:
                    reported = time.monotonic()
                    log.info(
                        "%d traces sampled in %.0f s, %d in progress", done, reported - started, self._in_progress()
                    )
                under_way = beside.submit(self._exchange, *self._tell())
                if under_way > self.pipeline.lag and not self._take_up(beside.wait()):
                    break
                heartbeat()  # also where nothing is sampled: the others move
        # Every rank has told as often as this one, so the exchanges still under way had an end.
        if self.interrupted:
            raise Interrupted
        return [self.episodes[index] for index in sorted(self.episodes)] if self.replica.leader else []

    def _draw(self, settled: dict[int, bool]) -> None:
        """Start what the feed gives next."""
        self.unsettled -= len(settled)
        tasks = self.feed.next(settled)
        if tasks is None:
            return self._give_up()
        for index, task in enumerate(tasks, self.drawn):
            if index % self.replica.count == self.replica.index:
                run = EpisodeRun(
                    self.pipeline.recipe, index, task, aggregates=self.aggregates, judged=self.replica.leader
                )
                self.runs[index] = run
                self._add(run.start())
        self.drawn += len(tasks)
        self.unsettled += len(tasks)

    def _give_up(self) -> None:
        self.unsettled = 0
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

    def _tell(self) -> tuple[_State, list[Request], list[Sample]]:
        """Settle what is complete; what this rank says at an exchange, and what it hands over."""
        settled = {index: self._settle(index) for index in self.complete}
        self.complete = [index for index, run in self.runs.items() if run.complete()]
        ready, self.ready = self.ready, []
        mail, self.mail = self.mail, []
        state = _State(
            stopped=self.pipeline.interrupted(),
            load=self._load(),
            ready=[(request.key, request.num_samples * len(request.prompt_ids)) for request in ready],
            mail=bool(mail),
            settled=settled,
            sampling=len(self.complete) < len(self.runs),
        )
        return state, ready, mail

    def _settle(self, index: int) -> bool:
        run = self.runs.pop(index)
        if not self.replica.leader:
            return False
        self.episodes[index] = run.finish()
        return self.feed.settle(self.episodes[index])

    def _exchange(self, state: _State, ready: list[Request], mail: list[Sample]) -> _News:
        """Place the sets that are ready and send all to where it belongs. Collective; one call at a time."""
        told = gather_objects(state, self.pipeline.group)
        states = self._of_replicas(told)
        loads = [sum(each) for each in zip((state.load for state in states), *self.placed, strict=True)]
        before = list(loads)
        places = place([item for each in states for item in each.ready], loads)
        self.placed.append([load - old for load, old in zip(loads, before, strict=True)])
        others = min((load for i, load in enumerate(loads) if i != self.replica.index), default=float("inf"))
        letters: list[Request | Sample] = [item for item in ready if places[item.key] == self.replica.index]
        if places or any(each.mail for each in states):
            letters = all_to_all_objects(self._outgoing(ready, mail, places), self.pipeline.group) + letters
        return _News(told, letters, others)

    def _of_replicas(self, told: list[_State]) -> list[_State]:
        return [told[self.replica.ranks(index)[0]] for index in range(self.replica.count)]

    def _outgoing(
        self, ready: list[Request], mail: list[Sample], places: dict[tuple[Any, ...], int]
    ) -> list[list[Request | Sample]]:
        """For each rank, the requests placed there and the samples of its problems."""
        count = self.replica.count
        outgoing: list[list[Request | Sample]] = [[] for _ in range(count * self.replica.size)]
        letters: list[tuple[int, Request | Sample]] = [(places[request.key], request) for request in ready]
        letters += [(sample.key[0] % count, sample) for sample in mail]
        for to, letter in letters if self.replica.leader else ():
            for rank in self.replica.ranks(to) if to != self.replica.index else ():
                outgoing[rank].append(letter)
        return outgoing

    def _take_up(self, news: _News) -> bool:
        """Act on an exchange; whether anything is left to do."""
        if any(each.stopped for each in news.told) and any(each.sampling for each in news.told):
            self.interrupted = True
            self._give_up()
            return False
        for letter in news.letters:
            if isinstance(letter, Request):
                self._add(letter)
            else:
                self._receive(letter)
        self.others = news.others
        self._draw({index: flag for each in self._of_replicas(news.told) for index, flag in each.settled.items()})
        return self.unsettled > 0


def place(ready: Sequence[tuple[tuple[Any, ...], int]], loads: list[int]) -> dict[tuple[Any, ...], int]:
    """Where each set goes: in order, to the engine that reads the least.

    `ready` has keys and tokens of context to read; `loads`, the tokens that each engine reads, are brought up to date.
    """
    places = {}
    for key, tokens in ready:
        places[key] = loads.index(min(loads))
        loads[places[key]] += tokens
    return places
