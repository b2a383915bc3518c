"""The exchange between ranks while they sample: statuses, routing of sets, messages.

A rank exchanges after a fixed number of its own engine's steps, or when the engine has no requests
left. So which engine samples what follows from the work alone, never from the clock: the same seed
and world size give the same run. An exchange runs in the background while the engines continue, and
its result is applied a fixed number of exchanges later, `LAG`, on every rank:

    engine        | steps  | steps  | steps  | steps  | steps  |   `exchange_interval` steps each
    main thread          S0       S1       S2 A0    S3 A1    S4 A2
    background             [--0--]   [--1--]  [--2--]  [--3--]

    Si  collect the status and the outbox, and submit exchange i
    [i] all-gather the statuses; route the ready sets; all-to-all of requests and samples, if any
    Ai  apply the result of exchange i; blocks only if a rank is more than `LAG` exchanges behind

A set goes to the replica that reads the least context, and its samples return to the replica that
owns the episode. With a single replica there is nothing to hide: results are applied at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

import torch.distributed as dist

from spiral_mega.config import RolloutConfig
from spiral_mega.distributed.background import BackgroundCollectives
from spiral_mega.distributed.collectives import all_to_all_objects, gather_objects
from spiral_mega.rollout.engine import Replica, Request, RequestKey, Sample
from spiral_mega.rollout.routing import ReadySet, route_sets

EXCHANGES_PER_RESPONSE = 64  # by default, for a response of the maximum length
MIN_INTERVAL = 8  # engine steps
LAG = 2  # exchanges from collecting a status to applying the result: how far engines may be apart

Message = Request | Sample


def exchange_interval(rollout: RolloutConfig) -> int:
    """Return the number of engine steps between two exchanges."""
    default = max(MIN_INTERVAL, rollout.sampling.max_response_tokens // EXCHANGES_PER_RESPONSE)
    return rollout.engine.exchange_steps or default


@dataclass(frozen=True, slots=True)
class RankStatus:
    """What a rank reports to all others at an exchange.

    `stopped`: the rank was asked to stop. `sampling`: some trace of its episodes is unfinished.
    `load`: tokens of context that a step of its engine reads. `has_samples`: it has samples for
    other replicas. `finalized`: for each episode finalized since the last exchange, by index,
    whether it is effective.
    """

    stopped: bool
    sampling: bool
    load: int
    ready_sets: list[ReadySet]
    has_samples: bool
    finalized: dict[int, bool]


@dataclass(frozen=True, slots=True)
class Outbox:
    """What a rank sends: requests to be routed, and samples for the replicas that own them."""

    requests: list[Request] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ExchangeResult:
    """What an exchange brings to a rank: a status of each replica, and messages.

    `stopped` and `sampling`: whether any rank is. `min_peer_load`: least load of another replica
    after routing.
    """

    statuses: list[RankStatus]
    messages: list[Message]
    min_peer_load: float
    stopped: bool
    sampling: bool


class Exchange:
    """The exchanges of one stream of episodes, on a background thread and `group`."""

    def __init__(self, replica: Replica, group: dist.ProcessGroup | None) -> None:
        self.replica, self.group = replica, group
        self.lag = LAG if replica.count > 1 else 0
        self._background = BackgroundCollectives()
        # For each of the last `lag` exchanges, the context routed to each replica, which their
        # reported loads do not contain yet.
        self._recently_routed: deque[list[int]] = deque(maxlen=self.lag)

    def __enter__(self) -> Exchange:
        self._background.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._background.__exit__(kind, error, traceback)

    def submit(self, status: RankStatus, outbox: Outbox) -> ExchangeResult | None:
        """Start the next exchange; return the result of `lag` exchanges ago, if there is one."""
        in_flight = self._background.submit(self._run, status, outbox)
        if in_flight <= self.lag:
            return None
        result: ExchangeResult = self._background.wait()
        return result

    def _run(self, status: RankStatus, outbox: Outbox) -> ExchangeResult:
        """Perform one exchange; collective."""
        of_ranks: list[RankStatus] = gather_objects(status, self.group)
        leaders = [self.replica.ranks(index)[0] for index in range(self.replica.count)]
        statuses = [of_ranks[rank] for rank in leaders]
        loads, destinations = self._route(statuses)
        peer_loads = [load for index, load in enumerate(loads) if index != self.replica.index]
        return ExchangeResult(
            statuses=statuses,
            messages=self._send(statuses, outbox, destinations),
            min_peer_load=min(peer_loads, default=float("inf")),
            stopped=any(each.stopped for each in of_ranks),
            sampling=any(each.sampling for each in of_ranks),
        )

    def _route(self, statuses: Sequence[RankStatus]) -> tuple[list[int], dict[RequestKey, int]]:
        """Route all ready sets; return the new loads, and the replica that each set goes to."""
        reported = [status.load for status in statuses]
        before = [sum(parts) for parts in zip(reported, *self._recently_routed, strict=True)]
        ready_sets = [ready for status in statuses for ready in status.ready_sets]
        loads = list(before)
        destinations = route_sets(ready_sets, loads)
        routed = [after - load for after, load in zip(loads, before, strict=True)]
        self._recently_routed.append(routed)
        return loads, destinations

    def _send(
        self, statuses: Sequence[RankStatus], outbox: Outbox, destinations: dict[RequestKey, int]
    ) -> list[Message]:
        """Send requests and samples; return this rank's messages, those of other replicas first."""
        own_index = self.replica.index
        own = [each for each in outbox.requests if destinations[each.key] == own_index]
        if not destinations and not any(status.has_samples for status in statuses):
            return []
        outgoing = self._outgoing(outbox, destinations)
        received: list[Message] = all_to_all_objects(outgoing, self.group)
        return [*received, *own]

    def _outgoing(self, outbox: Outbox, destinations: dict[RequestKey, int]) -> list[list[Message]]:
        """Return the messages for each rank; a leader sends to every rank of other replicas."""
        outgoing: list[list[Message]] = [[] for _ in range(self.replica.count * self.replica.size)]
        if not self.replica.leader:
            return outgoing
        for request in outbox.requests:
            self._address(request, destinations[request.key], outgoing)
        for sample in outbox.samples:
            self._address(sample, self.replica.owner(sample.key.episode), outgoing)
        return outgoing

    def _address(self, message: Message, replica: int, outgoing: list[list[Message]]) -> None:
        if replica != self.replica.index:
            for rank in self.replica.ranks(replica):
                outgoing[rank].append(message)
