"""Two engines that answer as one: search requests go to theta's, all others to phi's (paper, appendix B)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from spiral_mega.config.model_set import model_for
from spiral_mega.rollout.engine import Request, RolloutEngine, Sample
from spiral_mega.traces import SEARCH


class TwoEngines:
    """See spiral_mega.rollout.engine.Sampler. Weights go to each of `engines`, which are by their model's name."""

    def __init__(self, engines: Mapping[str, RolloutEngine]) -> None:
        self.engines, self.replica = dict(engines), engines[SEARCH].replica

    def add(self, request: Request) -> None:
        self.engines[model_for(request.component, self.engines)].add(request)

    def step(self) -> list[Sample]:
        return [sample for each in self.engines.values() if each.has_unfinished() for sample in each.step()]

    def has_unfinished(self) -> bool:
        return any(each.has_unfinished() for each in self.engines.values())

    def abort(self, keys: Collection[tuple[Any, ...]]) -> None:
        for each in self.engines.values():
            each.abort(keys)

    def reset_prefix_cache(self) -> None:
        for each in self.engines.values():
            each.reset_prefix_cache()

    def sleep(self) -> None:
        for each in self.engines.values():
            each.sleep()

    def close(self) -> None:
        for each in self.engines.values():
            each.close()
