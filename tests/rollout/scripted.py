"""Stand-ins with known behaviour, for what is about order, counts and ranks, and not about a model's numbers."""

import random
from collections.abc import Callable, Iterable
from typing import Any

import torch

from spiral_mega.config import Config
from spiral_mega.distributed.collectives import gather_objects
from spiral_mega.prompts.prompter import Prompter
from spiral_mega.rewards import VerifierPool
from spiral_mega.rollout.engine import Replica, Request, RequestKey, Sample
from spiral_mega.rollout.episode_builder import Task
from spiral_mega.rollout.pipeline import Pipeline
from spiral_mega.rollout.scheduler import TaskSource
from spiral_mega.seeds import derive_seed
from spiral_mega.traces import AGGREGATION, SEARCH, Episode, Problem, Trace
from tests.support.configs import make_config
from tests.support.tiny_models import END_ID, FIRST_WORD_ID, tiny_tokenizer

PROMPTS = {
    "aggregation": "w90 {problem} w91 {traces} w92",
    "trace": "w93 {trace}",
    "unfinished": "w94 {trace}",
    "instruction": "",
}
USER, ASSISTANT = 2, 3  # the tiny template's <|user|> and <|assistant|>


def word(number: int) -> int:
    """The token of "w<number>"."""
    return FIRST_WORD_ID + number


def problem(
    name: str, content: str = "w70 w71", *, answer: str = "w1 w2", verifier: str = "exact"
) -> Problem:
    return Problem(name, ({"role": "user", "content": content},), (answer,), verifier)


def task(of: Problem, *parts: int | str, step: int = 0) -> Task:
    return Task(of, step, (0, step, of.id, *parts))


# Those with an even number, which are the first of two ranks', read far more than the others.
UNEVEN = [task(problem(f"p{i}", " ".join(["w70"] * (2 if i % 2 else 24)))) for i in range(6)]


class ScriptedEngine:
    """Answers a sample by its seed and prompt alone; hands samples out one a step, in the order that `pick` chooses.

    `pick` gets the waiting (key, index) pairs, in the order of arrival. `events` are ("add", key) and
    ("done", (key, index)), in the order in which they happened.
    """

    def __init__(self, pick: Callable[[list[Any]], Any], *, idle_steps: int = 0) -> None:
        self.pick = pick
        self.replica = Replica()
        self.requests: list[Request] = []
        self.events: list[tuple[str, Any]] = []
        self.idle_steps = idle_steps
        self._waiting: dict[tuple[RequestKey, int], Request] = {}
        self._steps = 0

    def add(self, request: Request) -> None:
        self.requests.append(request)
        self.events.append(("add", request.key))
        self._waiting.update({(request.key, i): request for i in range(request.num_samples)})

    def has_unfinished(self) -> bool:
        return bool(self._waiting)

    def step(self) -> list[Sample]:
        self._steps += 1
        if self._steps % (self.idle_steps + 1):
            return []
        chosen = self.pick(list(self._waiting))
        request = self._waiting.pop(chosen)
        self.events.append(("done", chosen))
        return [scripted_sample(request, chosen[1])]

    def abort(self, keys: Any) -> None:
        self.events += [("abort", key) for key in keys]
        self._waiting = {
            each: request for each, request in self._waiting.items() if each[0] not in keys
        }

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        raise NotImplementedError


def scripted_sample(request: Request, index: int) -> Sample:
    """One to six words drawn by seed and prompt; most end with the end token, the others at the limit."""
    rng = random.Random(f"{request.seed + index} {request.prompt_ids}")
    ids = [word(rng.randrange(10)) for _ in range(rng.randrange(1, 7))]
    stops = rng.random() < 0.7
    ids = [*ids, END_ID] if stops else ids
    ids = ids[: request.max_tokens]
    finish = "stop" if ids[-1] == END_ID else "length"
    return Sample(request.key, index, ids, [-rng.random() for _ in ids], finish)


def first_come(waiting: list[Any]) -> Any:
    return waiting[0]


def last_come(waiting: list[Any]) -> Any:
    return waiting[-1]


def shuffled(seed: int) -> Callable[[list[Any]], Any]:
    return random.Random(seed).choice


def settings(**sections: Any) -> Config:
    """N1 = 6, n = 3, K = 4, N2 = 2, with short prompts of words."""
    algorithm = {"search_traces": 6, "set_size": 3, "num_sets": 4, "aggregation_traces": 2}
    rollout = {"sampling.max_response_tokens": 8, "sampling.max_context_tokens": 96}
    given = {
        "algorithm": algorithm,
        "rollout": rollout,
        "prompts": PROMPTS,
        "policy": {"microbatch_tokens": 128},
    }
    names = given.keys() | sections.keys()
    return make_config(
        "unused", **{name: given.get(name, {}) | sections.get(name, {}) for name in names}
    )


def pipeline_of(engine: Any, verifier: VerifierPool | Any, config: Config, **more: Any) -> Pipeline:
    tokenizer = tiny_tokenizer()
    prompter = Prompter(config.prompts, tokenizer)
    return Pipeline(engine, prompter, verifier, tokenizer, config.algorithm, config.rollout, **more)


class ScriptedPipeline:
    """Episodes whose rewards are drawn by the task's seed parts: all equal with probability 1 - `effective_share`.

    `calls` are this rank's tasks of each `run` or `stream`, `in_progress` how many were at each moment of the last
    stream. In which order those of a stream end depends on the number of ranks. Without aggregation for `grpo`.
    """

    def __init__(
        self, effective_share: float, algorithm: Any, replica: Replica | None = None
    ) -> None:
        self.effective_share, self.algorithm = effective_share, algorithm
        self.replica = replica or Replica()
        self.calls: list[list[Task]] = []

    def run(self, tasks: list[Task]) -> list[Episode]:
        mine = range(self.replica.index, len(tasks), self.replica.count)
        self.calls.append([tasks[i] for i in mine])
        return [self.episode(i, tasks[i]) for i in mine]

    def stream(self, source: TaskSource) -> list[Episode]:
        count = self.replica.count
        waiting: dict[int, Task] = {}
        whole: dict[int, Episode] = {}
        self.calls.append([])
        self.in_progress: list[int] = []
        started, new = 0, source.next({})
        while new is not None and (new or waiting):
            waiting.update(enumerate(new, started))
            self.calls[-1] += [
                each for i, each in enumerate(new, started) if i % count == self.replica.index
            ]
            started += len(new)
            self.in_progress.append(len(waiting))
            ended = {i for i in waiting if derive_seed(i, started, count) % 3 == 0} or {
                max(waiting)
            }
            mine = {
                i: self.episode(i, waiting[i]) for i in ended if i % count == self.replica.index
            }
            whole |= mine
            waiting = {i: each for i, each in waiting.items() if i not in ended}
            flags = gather_objects({i: source.finalize(episode) for i, episode in mine.items()})
            new = source.next({i: flag for part in flags for i, flag in part.items()})
        return [whole[i] for i in sorted(whole)]

    def effective(self, seed_parts: tuple[int | str, ...]) -> bool:
        return derive_seed(*seed_parts, "effective") / 2**62 < self.effective_share

    def episode(self, index: int, each: Task) -> Episode:
        rng = random.Random(derive_seed(*each.seed_parts))
        first = [1.0, 0.0] if self.effective(each.seed_parts) else [1.0, 1.0]
        search = [scripted_trace(SEARCH, i, reward, rng) for i, reward in enumerate(first)]
        if self.algorithm.objective == "grpo":
            return Episode(each.problem, each.step, search, index=index)
        sets = [(0,), (1,)]
        groups = [
            [scripted_trace(AGGREGATION, i, float(rng.random() < 0.4), rng, l) for i in (0, 1)]
            for l in (0, 1)
        ]
        return Episode(each.problem, each.step, search, sets, groups, index=index)


def scripted_trace(
    component: str, index: int, reward: float, rng: random.Random, set_index: int | None = None
) -> Trace:
    ids = [word(rng.randrange(10)) for _ in range(3)]
    return Trace(
        component, index, [1, 2], ids, [-rng.random() for _ in ids], "stop", "w1", set_index, reward
    )
