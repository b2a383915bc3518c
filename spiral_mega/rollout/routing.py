"""Which engine a set goes to: the one that reads the least context.

A set whose last member finishes starts at once on the engine of its episode, unless another one reads
less (`spiral_mega.rollout.scheduler`). Then all ranks route it here, at the next exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from spiral_mega.rollout.engine import RequestKey


class ReadySet(NamedTuple):
    """A set to be routed, and the tokens of context that all of its answers read."""

    key: RequestKey
    tokens: int


def route_sets(ready_sets: Sequence[ReadySet], loads: list[int]) -> dict[RequestKey, int]:
    """Route each set, in order, to the replica that reads the least; return the replica by key.

    `loads`, the tokens of context that each replica's engine reads in a step, are updated in place.
    """
    destinations = {}
    for key, tokens in ready_sets:
        replica = loads.index(min(loads))
        destinations[key] = replica
        loads[replica] += tokens
    return destinations
