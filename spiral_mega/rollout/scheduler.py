"""The scheduler of one rank: what its engine samples next, and which episodes are done.

A task belongs to the replica that its index selects, which samples its search traces. A set is
requested as soon as its last member finishes: at once on this engine, unless another one reads less
context; then it waits for the next exchange (`spiral_mega.rollout.exchange`), which routes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from spiral_mega.process.heartbeat import heartbeat
from spiral_mega.rollout.engine import Request, RequestKey, Sample, Sampler
from spiral_mega.rollout.episode_builder import EpisodeBuilder, SamplingContext, Task
from spiral_mega.rollout.exchange import ExchangeResult, Outbox, RankStatus
from spiral_mega.rollout.routing import ReadySet
from spiral_mega.traces import Episode


class TaskSource(Protocol):
    """Supplies tasks. Every rank has one, and all of them make the same decisions."""

    def finalize(self, episode: Episode) -> bool:
        """Assign credit to a complete episode, on its leader; return whether it is effective."""

    def next(self, finalized: dict[int, bool]) -> list[Task] | None:
        """Return new tasks, or None to cancel all unfinalized ones.

        `finalized` has, for each episode finalized since the last call, whether it is effective, by
        the index of its task in the order of all tasks returned.
        """


@dataclass(slots=True)
class _InFlight:
    """A request on this engine, its missing samples, and the engine step when it was added."""

    request: Request
    missing: int
    added_at: int

    def load(self, engine_step: int) -> int:
        """Tokens of context that its unfinished samples read in a step, if none was waiting."""
        return self.missing * (len(self.request.prompt_ids) + engine_step - self.added_at)


class Scheduler:
    """Samples the episodes of one stream on this rank; see the module's docstring."""

    def __init__(
        self,
        context: SamplingContext,
        engine: Sampler,
        source: TaskSource,
        *,
        interrupted: Callable[[], bool],
    ) -> None:
        self.context, self.engine, self.source = context, engine, source
        self.interrupted = interrupted
        self.replica = engine.replica
        self.builders: dict[int, EpisodeBuilder] = {}  # unfinalized episodes that this replica owns
        self.complete: list[int] = []  # at the last exchange; finalized, with rewards, at the next
        self.episodes: dict[int, Episode] = {}  # finalized, on the leader
        self.in_flight: dict[RequestKey, _InFlight] = {}
        self.ready_requests: list[Request] = []  # sets that wait to be routed
        self.outgoing_samples: list[Sample] = []  # sampled here for episodes of other replicas
        self.min_peer_load = float("inf")  # of other replicas, as of the last exchange applied
        self.num_tasks = 0
        self.num_unfinalized = 0  # over all ranks, as of the last exchange applied
        self.engine_step = 0
        self.num_samples = 0
        self.stopped = False

    def start(self) -> None:
        """Start the first tasks."""
        self._start_tasks({})

    def run_engine(self, max_steps: int) -> None:
        """Advance the engine by up to `max_steps` steps, fewer if it runs out of requests."""
        last_step = self.engine_step + max_steps
        while self.engine.has_unfinished() and self.engine_step < last_step:
            self.engine_step += 1
            heartbeat()
            for sample in self.engine.step():
                self.num_samples += 1
                self._receive(sample)

    def collect_status(self) -> tuple[RankStatus, Outbox]:
        """Finalize complete episodes; return this rank's status and outgoing messages."""
        finalized = {index: self._finalize(index) for index in self.complete}
        self.complete = [index for index, builder in self.builders.items() if builder.is_complete()]
        outbox = Outbox(self.ready_requests, self.outgoing_samples)
        ready_sets = [_ready_set(request) for request in outbox.requests]
        self.ready_requests, self.outgoing_samples = [], []
        status = RankStatus(
            stopped=self.interrupted(),
            sampling=len(self.complete) < len(self.builders),
            load=self._load(),
            ready_sets=ready_sets,
            has_samples=bool(outbox.samples),
            finalized=finalized,
        )
        return status, outbox

    def apply(self, result: ExchangeResult) -> None:
        """Act on an exchange: stop, or submit what came here and start the tasks that follow."""
        if result.stopped and result.sampling:
            self.stopped = True
            self._cancel_all()
            return
        for message in result.messages:
            if isinstance(message, Request):
                self._submit(message)
            else:
                self._add_to_episode(message)
        self.min_peer_load = result.min_peer_load
        finalized: dict[int, bool] = {}
        for status in result.statuses:
            finalized |= status.finalized
        self._start_tasks(finalized)

    def num_in_flight(self) -> int:
        """Return how many samples this engine is still to return."""
        return sum(each.missing for each in self.in_flight.values())

    def _start_tasks(self, finalized: dict[int, bool]) -> None:
        self.num_unfinalized -= len(finalized)
        tasks = self.source.next(finalized)
        if tasks is None:
            self._cancel_all()
            return
        for index, task in enumerate(tasks, self.num_tasks):
            if self.replica.owns(index):
                builder = EpisodeBuilder(
                    self.context, index, task, verify_rewards=self.replica.leader
                )
                self.builders[index] = builder
                self._submit(builder.first_request())
        self.num_tasks += len(tasks)
        self.num_unfinalized += len(tasks)

    def _cancel_all(self) -> None:
        """Cancel every unfinalized episode, on all ranks alike."""
        self.num_unfinalized = 0
        self.engine.abort(self.in_flight.keys())
        self.in_flight.clear()
        self.builders.clear()
        self.complete.clear()
        self.ready_requests.clear()
        self.outgoing_samples.clear()

    def _submit(self, request: Request) -> None:
        self.in_flight[request.key] = _InFlight(request, request.num_samples, self.engine_step)
        self.engine.add(request)

    def _receive(self, sample: Sample) -> None:
        """Add a sample of this engine to its episode, or keep it for the episode's owner."""
        in_flight = self.in_flight[sample.key]
        in_flight.missing -= 1
        if not in_flight.missing:
            del self.in_flight[sample.key]
        if self.replica.owns(sample.key.episode):
            self._add_to_episode(sample)
        else:
            self.outgoing_samples.append(sample)

    def _add_to_episode(self, sample: Sample) -> None:
        """Add a sample to its episode; submit the requests that follow, or have them routed."""
        for request in self.builders[sample.key.episode].add_sample(sample):
            if self._load() <= self.min_peer_load:
                self._submit(request)
            else:
                self.ready_requests.append(request)

    def _load(self) -> int:
        """Return about how many tokens of context a step of this engine reads."""
        return sum(each.load(self.engine_step) for each in self.in_flight.values())

    def _finalize(self, index: int) -> bool:
        """Build an episode and assign credit, on the leader; return whether it is effective."""
        builder = self.builders.pop(index)
        if not self.replica.leader:
            return False
        episode = builder.build()
        self.episodes[index] = episode
        return self.source.finalize(episode)


def _ready_set(request: Request) -> ReadySet:
    return ReadySet(request.key, request.num_samples * len(request.prompt_ids))
