"""Two engines behind one interface, for theta and phi (paper, appendix B).

Search requests go to theta's engine, all others to phi's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from spiral_mega.config.model_set import model_for
from spiral_mega.rollout.engine import Request, RequestKey, RolloutEngine, Sample
from spiral_mega.traces import SEARCH


class TwoEngines:
    """A `Sampler` over `engines` by model name; weights are loaded into each engine directly."""

    def __init__(self, engines: Mapping[str, RolloutEngine]) -> None:
        self.engines, self.replica = dict(engines), engines[SEARCH].replica

    def add(self, request: Request) -> None:
        self.engines[model_for(request.key.component, self.engines)].add(request)

    def step(self) -> list[Sample]:
        samples = []
        for engine in self.engines.values():
            if engine.has_unfinished():
                samples += engine.step()
        return samples

    def has_unfinished(self) -> bool:
        return any(engine.has_unfinished() for engine in self.engines.values())

    def abort(self, keys: Collection[RequestKey]) -> None:
        for engine in self.engines.values():
            engine.abort(keys)

    def reset_prefix_cache(self) -> None:
        for engine in self.engines.values():
            engine.reset_prefix_cache()

    def sleep(self) -> None:
        for engine in self.engines.values():
            engine.sleep()

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()
