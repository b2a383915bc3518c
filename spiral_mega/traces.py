"""The records that travel from the data to the optimizer: Problem, Trace, Episode."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length"]
SEARCH, AGGREGATION = "search", "aggregation"
ADVANTAGE_EPS = 1e-8  # advantages up to this are rounding errors, and are not trained on


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of the data.

    `messages` is the chat that poses it; `answer` holds the accepted ground truths as text, any of
    which is right; `verifier` names the verifier (see `spiral_mega.rewards`).
    """

    id: str
    messages: tuple[dict[str, str], ...]
    answer: tuple[str, ...]
    verifier: str
    source: str = ""
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Trace:
    """One sampled response and everything that training learns of it.

    `response_ids` [L] includes the end token when `finish == "stop"`; `logprobs` [L] are the
    sampler's, under its temperature; `cached_tokens` of the prompt were in the engine's prefix
    cache. `component` is what the loss weights apply to ("search", "aggregation"). `advantage` is
    the credit after the length gate; `gated` says that the gate set it to zero. `verification` is
    "ok", or how the verifier failed (the reward is then 0).

    `observation_spans` are ranges [start, stop) of the response that an environment wrote between
    the model's turns: they were not sampled, so their log-probs are NaN, and they have no loss. The
    last turn is `text[answer_start:]`.
    """

    component: str
    index: int
    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: list[float]
    finish: FinishReason
    text: str
    set_index: int | None = None
    reward: float = 0.0
    verification: str = "ok"
    advantage: float = 0.0
    gated: bool = False
    cached_tokens: int = 0
    observation_spans: list[tuple[int, int]] = field(default_factory=list)
    answer_start: int = 0

    @property
    def length(self) -> int:
        """Response tokens that the model wrote, end tokens included."""
        return len(self.response_ids) - sum(stop - start for start, stop in self.observation_spans)

    @property
    def answer_text(self) -> str:
        """The last turn, which contains the answer."""
        return self.text[self.answer_start :]

    @property
    def effective(self) -> bool:
        """Whether it receives a gradient: its gated advantage is more than a rounding error."""
        return abs(self.advantage) > ADVANTAGE_EPS


@dataclass(slots=True)
class Episode:
    """All samples of one problem: N1 search traces, K sets of them, N2 aggregation traces a set.

    A set's members are positions in `traces()`: of search traces, and with several levels also of
    answers to earlier sets. Without aggregation, `aggregation` is empty, and `sets` too unless
    credit is by sets. `index` numbers the prompts of a batch in the order of sampling, over all
    ranks.
    """

    problem: Problem
    step: int
    search: list[Trace]
    sets: list[tuple[int, ...]] = field(default_factory=list)
    aggregation: list[list[Trace]] = field(default_factory=list)
    index: int = field(kw_only=True)

    def traces(self) -> list[Trace]:
        """Return the search traces, then the aggregation traces set by set."""
        return [*self.search, *(trace for answers in self.aggregation for trace in answers)]

    def answered_sets(self) -> list[tuple[tuple[int, ...], list[Trace]]]:
        """Return each set with its answers; an empty list where sets are for credit alone."""
        return list(zip(self.sets, self.aggregation, strict=True)) if self.aggregation else []

    def effective(self) -> bool:
        """Whether any trace receives a gradient."""
        return any(trace.effective for trace in self.traces())


def aggregation_rewards(episode: Episode) -> list[list[float]]:
    """Return the rewards of the aggregation traces, set by set.

    Raises ValueError without sets, or without answers to them.
    """
    if not episode.sets or len(episode.aggregation) != len(episode.sets):
        raise ValueError(
            f"problem {episode.problem.id} has {len(episode.sets)} sets and "
            f"{len(episode.aggregation)} groups of aggregation traces: this objective needs one "
            "group for each set, and at least one set"
        )
    return [_rewards(answers) for answers in episode.aggregation]


def _rewards(traces: list[Trace]) -> list[float]:
    return [trace.reward for trace in traces]
