"""What `spiral-mega eval` measures: test-time harnesses, each declared by its kind and sizes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from spiral_mega.config.section import Section


class _Samples(Section):
    name: str | None = Field(default=None, description="Names its results; null: its kind.")
    samples: int = Field(default=32, gt=0, le=1000, description="Responses to each problem that are drawn from.")
    ks: list[Annotated[int, Field(gt=0)]] | None = Field(
        default=None, min_length=1, description="Numbers of responses to report; null: powers of two up to `samples`."
    )

    @model_validator(mode="after")
    def _within(self) -> _Samples:
        if self.ks is not None and max(self.ks) > self.samples:
            raise ValueError(
                f"eval.harnesses: ks holds {max(self.ks)}, but samples is {self.samples}: sample more, or lower it"
            )
        return self


class PassAtK(_Samples):
    """Probability that some of k responses is right (reward 1 or more)."""

    kind: Literal["pass_at_k"] = "pass_at_k"


class Majority(_Samples):
    """Reward of the answer that most of k responses give."""

    kind: Literal["majority"] = "majority"


class BestOfN(_Samples):
    """Reward of the best of k responses, picked by an oracle: the verifier."""

    kind: Literal["best_of_n"] = "best_of_n"


class Sequential(Section):
    """Mean reward of a single response as it may be longer and longer."""

    kind: Literal["sequential"] = "sequential"
    name: str | None = None
    samples: int = Field(default=8, gt=0)
    budgets: list[Annotated[int, Field(gt=0)]] | None = Field(
        default=None,
        min_length=1,
        description="Tokens that a response may have; null: 1/8, 1/4, 1/2 and all of rollout.sampling.max_response_tokens.",
    )


class Rsa(Section):
    """Recursive self-aggregation: `steps` times, each of a new population answers a set of the last one's traces."""

    kind: Literal["rsa"] = "rsa"
    name: str | None = None
    population: int = Field(default=8, gt=0)
    set_size: int = Field(default=4, gt=0)
    steps: int = Field(default=4, gt=0)

    @model_validator(mode="after")
    def _sets_exist(self) -> Rsa:
        if self.set_size > self.population:
            raise ValueError(
                f"eval.harnesses: rsa has set_size {self.set_size} and a population of {self.population}: a set takes "
                "each trace once, so lower the first or raise the second"
            )
        return self


class Stage(Section):
    """One stage of a pipeline: `search` responses to the problem, or `aggregate` responses to a set each.

    A set has `set_size` traces of the stage before; a response at most `tokens`.
    """

    search: int | None = Field(default=None, gt=0)
    aggregate: int | None = Field(default=None, gt=0)
    set_size: int | None = Field(default=None, gt=0)
    tokens: int | None = Field(default=None, gt=0, description="null: rollout.sampling.max_response_tokens.")


class Composition(Section):
    """Stages one after the other, read at the end: search first, then any number of aggregations."""

    kind: Literal["pipeline"] = "pipeline"
    name: str
    stages: list[Stage] = Field(min_length=1)
    read: Literal["mean", "majority", "best"] = Field(
        default="mean", description="Of the last stage's rewards: the mean, that of the majority, the oracle's best."
    )

    @model_validator(mode="after")
    def _stages_fit(self) -> Composition:
        population = 0
        for number, stage in enumerate(self.stages):
            where = f"eval.harnesses: stage {number} of {self.name!r}"
            if number == 0 and (stage.search is None or stage.aggregate is not None or stage.set_size is not None):
                raise ValueError(f"{where} must have search, and neither aggregate nor set_size")
            if number > 0 and (stage.search is not None or stage.aggregate is None or stage.set_size is None):
                raise ValueError(f"{where} must have aggregate and set_size, and no search")
            if stage.set_size is not None and stage.set_size > population:
                raise ValueError(f"{where} has set_size {stage.set_size}, but the stage before has {population} traces")
            population = stage.search or stage.aggregate or 0
        return self


Harness = Annotated[PassAtK | Majority | BestOfN | Sequential | Rsa | Composition, Field(discriminator="kind")]
HARNESSES: dict[str, type[Section]] = {
    "pass_at_k": PassAtK,
    "majority": Majority,
    "best_of_n": BestOfN,
    "sequential": Sequential,
    "rsa": Rsa,
    "pipeline": Composition,
}
