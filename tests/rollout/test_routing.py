"""Sets are routed to the replica that reads the least, and what was routed lately counts before it is reported."""

import itertools

import pytest

from spiral_mega.rollout.engine import Replica, Request, RequestKey, Sample
from spiral_mega.rollout.exchange import Exchange, Outbox, RankStatus
from spiral_mega.rollout.routing import ReadySet, route_sets
from spiral_mega.traces import AGGREGATION, SEARCH


def ready_sets(*tokens: int) -> list[ReadySet]:
    return [ReadySet(RequestKey(i, AGGREGATION, 0), count) for i, count in enumerate(tokens)]


def status(load: int, *tokens: int) -> RankStatus:
    return RankStatus(False, True, load, ready_sets(*tokens), has_samples=False, finalized={})


@pytest.mark.parametrize("loads", list(itertools.product([0, 3, 10], repeat=3)))
def test_each_set_goes_to_the_least_loaded_replica_in_order(loads):
    before = list(loads)
    after = list(loads)
    destinations = route_sets(ready_sets(4, 1, 7, 2), after)
    for key, tokens in ready_sets(4, 1, 7, 2):
        assert before[destinations[key]] == min(before)
        before[destinations[key]] += tokens
    assert before == after


def test_what_was_routed_counts_until_the_replicas_report_it():
    """A replica that got a large set must not get the next one only because its report is older than the set."""
    exchange = Exchange(Replica(count=2), group=None)
    assert exchange.lag == 2
    _, first = exchange._route([status(0, 100), status(1)])
    assert list(first.values()) == [0]
    for _ in range(2):
        loads, later = exchange._route([status(0, 5), status(1)])
        assert list(later.values()) == [1]
    assert loads == [100, 11]
    loads, _ = exchange._route([status(100), status(11)])
    assert loads == [100, 21], "the first set is two exchanges old: it is in the reported load"


def test_a_leader_sends_to_every_rank_of_the_other_replicas_and_the_others_send_nothing():
    request = Request(RequestKey(0, AGGREGATION, 0), [1], 2, 0, 4)
    samples = [Sample(RequestKey(episode, SEARCH), 0, [5], [-1.0], "stop") for episode in (1, 2)]
    outbox = Outbox([request], samples)
    leader = Exchange(Replica(index=0, count=3, leader=True, size=2), group=None)
    outgoing = leader._outgoing(outbox, {request.key: 2})
    assert outgoing == [
        [],
        [],
        [samples[0]],
        [samples[0]],
        [request, samples[1]],
        [request, samples[1]],
    ]
    other = Exchange(Replica(index=0, count=3, leader=False, size=2), group=None)
    assert other._outgoing(outbox, {request.key: 2}) == [[]] * 6
    assert not any(leader._outgoing(Outbox([request], []), {request.key: 0}))
