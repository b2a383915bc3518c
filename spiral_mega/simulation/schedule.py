"""Schedules of a rollout step, and the event loop that simulates one on several engines."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Literal

import numpy as np

from spiral_mega.simulation.sim_engine import EPSILON, Engine, SimSequence
from spiral_mega.simulation.workload import EngineModel, SimProblem, prompt_parts

MOVE_RATIO = (
    0.5  # traces move to an engine that reads less than this share of the busiest engine's context
)
MAX_MOVES = 4  # pairs of engines balanced at one event


@dataclass(frozen=True, slots=True)
class SimPolicy:
    """A schedule of a step. No decision uses a trace's length before the trace has ended.

    - `barrier`: sets wait for all search traces of the step, of their engine, or only for their
      members.
    - `quota`: None starts problem i on engine i % G; a share starts each engine with that share of
      an equal part, and it takes the next problem from a common queue whenever one of its problems
      has ended its search.
    - `ordered`: an engine admits sets before search, and sets with the longest members first.
    - `route`: a set goes to the engine that reads the least context per step, instead of its
      problem's engine.
    - `move`: unfinished traces move from the engine that reads the most to the one that reads the
      least, which prefills them again, while the two differ much and reading takes a good part of a
      step.
    - `exchange`: the trainer's schedule. Engines exchange their status every so many steps; a ready
      set starts at once on its own engine if that reads no more than the others did, and is routed
      otherwise. The result of an exchange is applied `lag` exchanges later, so an engine waits only
      for those that are further behind.
    - `extra`: this share of problems is started in addition; the step ends when the wanted number
      is complete.
    """

    name: str
    barrier: Literal["step", "engine", "none"] = "none"
    quota: float | None = None
    ordered: bool = False
    route: bool = False
    move: bool = False
    exchange: int | None = None
    lag: int = 0
    extra: float = 0.0


POLICIES = (
    SimPolicy("barrier", barrier="step"),
    SimPolicy("barrier per rank", barrier="engine"),
    SimPolicy("streaming", quota=None),
    SimPolicy("streaming, problem queue", quota=0.75),
    SimPolicy("streaming, ordered", ordered=True),
    SimPolicy("streaming, exchange of 64", ordered=True, exchange=64),
    SimPolicy("exchange of 64, lag 2", ordered=True, exchange=64, lag=2),
    SimPolicy("streaming, routed", ordered=True, route=True),
    SimPolicy("streaming, routed, moving", ordered=True, route=True, move=True),
    SimPolicy("routed, moving, 15 % extra", ordered=True, route=True, move=True, extra=0.15),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a schedule: sums over all engines, times in seconds. `kept` are the complete problems, in order."""

    makespan: float
    busy: float
    steps: float
    decoded: float  # tokens
    ended: int  # traces
    preemptions: int
    moved: int  # traces
    peak_cache: float  # most tokens in the cache of any engine
    kept: tuple[int, ...]


def simulate(
    policy: SimPolicy, problems: Seq[SimProblem], model: EngineModel, engines: int, want: int
) -> Outcome:
    """Simulate a step until `want` of `problems` are complete."""
    if not 1 <= want <= len(problems):
        raise ValueError(f"want is {want}: it must be between 1 and the {len(problems)} problems")
    return (_EventLoop if policy.exchange is None else _ExchangeLoop)(
        policy, problems, model, engines, want
    ).run()


class _EventLoop:
    """Runs all engines on one clock, event by event."""

    def __init__(
        self,
        policy: SimPolicy,
        problems: Seq[SimProblem],
        model: EngineModel,
        engines: int,
        want: int,
    ) -> None:
        self.policy, self.problems, self.want = policy, problems, want
        self.engines = [Engine(model) for _ in range(engines)]
        self.owner = [i % engines for i in range(len(problems))]
        self.queue: deque[int] = deque()
        self.searching = [set(range(len(p.search))) for p in problems]
        self.waiting = [set(range(len(p.sets))) for p in problems]
        self.missing = [len(list(p.lengths())) for p in problems]  # traces, also those in no set
        self.engine_of: dict[
            SimSequence, int
        ] = {}  # engine of every unfinished trace that was submitted
        self.demand = np.zeros(engines)  # tokens of context read per step once all are decoding
        self.enough = model.step / (
            2 * model.kv
        )  # demand whose reading takes half of a step's fixed time
        self.events: list[tuple[float, int, int]] = []
        self.version = [0] * engines  # events of an older version are stale
        self.just_ended: deque[SimSequence] = deque()
        self.kept: list[int] = []
        self.ended = self.moved = 0
        self.now = 0.0

    def run(self) -> Outcome:
        self._start()
        while len(self.kept) < self.want:
            time, e, version = heappop(self.events)
            if version != self.version[e]:
                continue
            self.now = time
            self._advance(e)
            self._schedule_event(e)
            while self.just_ended:
                self._end(self.just_ended.popleft())
                if self.policy.move and not self.just_ended:
                    self._balance()  # may end other traces
        for e in range(len(self.engines)):
            self._advance(e)
        return self._outcome()

    def _outcome(self) -> Outcome:
        return Outcome(
            makespan=self.now,
            busy=sum(engine.busy for engine in self.engines),
            steps=sum(engine.steps for engine in self.engines),
            decoded=sum(engine.decoded for engine in self.engines),
            ended=self.ended,
            preemptions=sum(engine.preemptions for engine in self.engines),
            moved=self.moved,
            peak_cache=max(engine.peak for engine in self.engines),
            kept=tuple(sorted(self.kept)),
        )

    def _start(self) -> None:
        count = len(self.problems)
        started = count
        if self.policy.quota is not None:
            share = max(1, math.floor(self.policy.quota * count / len(self.engines)))
            started = min(count, share * len(self.engines))
        self.queue.extend(range(started, count))
        for i in range(started):
            self._search(i)

    def _search(self, i: int) -> None:
        prompt = prompt_parts(i, self.problems[i], None)
        for j, length in enumerate(self.problems[i].search):
            self._submit(SimSequence((i, None, j), length, prompt, rank=1.0), self.owner[i])

    def _end(self, sequence: SimSequence) -> None:
        e = self.engine_of.pop(sequence)
        self.ended += 1
        i, l, j = sequence.key
        self.missing[i] -= 1
        if not self.missing[i]:
            self.kept.append(i)
        if l is not None:
            return
        self.searching[i].remove(j)
        if not self.searching[i] and self.queue:
            following = self.queue.popleft()
            self.owner[following] = e
            self._search(following)
        for ready in self._released(i):
            self._aggregate(ready)

    def _released(self, i: int) -> list[int]:
        """Return the problems whose sets now wait only for their members: a search trace of problem i has ended."""
        if self.policy.barrier == "none":
            return [i]
        step = self.policy.barrier == "step"
        group = [k for k in range(len(self.problems)) if step or self.owner[k] == self.owner[i]]
        return [] if any(self.searching[k] for k in group) else group

    def _aggregate(self, i: int) -> None:
        problem = self.problems[i]
        ready = [
            l for l in sorted(self.waiting[i]) if self.searching[i].isdisjoint(problem.sets[l])
        ]
        for l in ready:
            self.waiting[i].remove(l)
            parts = prompt_parts(i, problem, l)
            rank = -float(sum(tokens for _, tokens in parts)) if self.policy.ordered else 1.0
            answers = enumerate(problem.aggregation[l])
            self._start_set(
                i, [SimSequence((i, l, j), length, parts, rank) for j, length in answers]
            )

    def _start_set(self, i: int, sequences: list[SimSequence]) -> None:
        e = int(self.demand.argmin()) if self.policy.route else self.owner[i]
        for sequence in sequences:
            self._submit(sequence, e)

    def _submit(self, sequence: SimSequence, e: int) -> None:
        self.engine_of[sequence] = e
        self._advance(e)
        self.engines[e].add(sequence)
        self._schedule_event(e)

    def _advance(self, e: int) -> None:
        self.just_ended.extend(self.engines[e].advance(self.now))

    def _schedule_event(self, e: int) -> None:
        self.version[e] += 1
        self.demand[e] = self.engines[e].demand()
        time = self.engines[e].next_event()
        if time < math.inf:
            heappush(self.events, (max(time, self.now), e, self.version[e]))

    def _balance(self) -> None:
        """Move the traces admitted last from the engine with the most demand to the one with the least."""
        for _ in range(MAX_MOVES):
            least, most = int(self.demand.argmin()), int(self.demand.argmax())
            gap = float(self.demand[most] - self.demand[least])
            if (
                self.demand[most] < self.enough
                or self.demand[least] > MOVE_RATIO * self.demand[most]
            ):
                return
            self._advance(most)
            chosen: list[SimSequence] = []
            for sequence in reversed(self.engines[most].sequences()):
                gap -= 2 * sequence.context
                if gap < 0:
                    break
                chosen.append(sequence)
            for sequence in chosen:
                self.engines[most].remove(sequence)
                self._submit(sequence, least)
            self._schedule_event(most)
            self.moved += len(chosen)
            if not chosen:
                return


class _ExchangeLoop(_EventLoop):
    """Runs each engine on its own clock, at most `lag` exchanges ahead of the slowest."""

    def run(self) -> Outcome:
        self._start()
        self.min_peer_demand = np.full(
            len(self.engines), np.inf
        )  # least context read by another engine, as of the last exchange applied
        self.ready: list[tuple[int, list[SimSequence]]] = []
        statuses: deque[_Status] = deque()
        placed: deque[np.ndarray] = deque(
            maxlen=self.policy.lag
        )  # tokens by engine that no status shows yet
        while len(self.kept) < self.want:
            for e in range(len(self.engines)):
                self._run_steps(e)
            self.now = max(engine.now for engine in self.engines)
            statuses.append(
                _Status(
                    self.now, np.array([engine.demand() for engine in self.engines]), self.ready
                )
            )
            self.ready = []
            if len(statuses) > self.policy.lag:
                placed.append(
                    self._apply(statuses.popleft(), sum(placed, np.zeros(len(self.engines))))
                )
        return self._outcome()

    def _run_steps(self, e: int) -> None:
        engine, goal = self.engines[e], self.engines[e].steps + (self.policy.exchange or 0)
        while engine.admitted and engine.steps < goal - EPSILON:
            left = goal - engine.steps
            reached = (
                engine.now
                + left * engine.step_time()
                + engine.model.kv * engine.batch * left * left / 2
            )
            self.just_ended.extend(engine.advance(min(engine.next_event(), reached)))
            while self.just_ended:
                self._end(self.just_ended.popleft())

    def _submit(self, sequence: SimSequence, e: int) -> None:
        self.engine_of[sequence] = e
        self.engines[e].add(sequence)

    def _start_set(self, i: int, sequences: list[SimSequence]) -> None:
        owner = self.owner[i]
        if self.engines[owner].demand() <= self.min_peer_demand[owner]:
            for sequence in sequences:
                self._submit(sequence, owner)
        else:
            self.ready.append((owner, sequences))

    def _apply(self, status: _Status, in_transit: np.ndarray) -> np.ndarray:
        """Route the sets that were ready; return the tokens that each engine will read of them."""
        for engine in self.engines:
            engine.now = max(engine.now, status.time)
        before = status.demand + in_transit
        demand = before.copy()
        for _, sequences in sorted(status.ready, key=lambda each: each[0]):
            e = int(demand.argmin())
            demand[e] += sum(sequence.context for sequence in sequences)
            for sequence in sequences:
                self._submit(sequence, e)
        if len(demand) > 1:
            least = np.sort(demand)[:2]
            self.min_peer_demand = np.where(demand == least[0], least[1], least[0])
        return demand - before


@dataclass(frozen=True, slots=True)
class _Status:
    """One exchange, at the time all engines had taken part: context that each reads, and the sets that are ready."""

    time: float
    demand: np.ndarray
    ready: list[tuple[int, list[SimSequence]]]
