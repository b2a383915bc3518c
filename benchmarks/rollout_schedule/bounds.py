"""Lower bound on a step's makespan for any schedule, given the engine model and every length.

Notation: T the makespan, G engines, a the fixed time per step, w(u) = sequence + kv * context the
time that one token adds to its step. Let S be the number of steps of all engines together and W the
time of all tokens and of every distinct prefill. Engines work at most G T in all, so a S + W <= G
T. It remains to bound S from below, in three ways:

- batch: a step decodes at most `max_sequences` tokens.
- cache: a step holds at most `capacity` tokens of context; a part of a prompt counts for each token written after it
  by one over the number of traces that share it.
- deadlines: charge a step's a to its traces in proportion to their w. A trace of L tokens that must be written within
  D seconds sees steps with sum (a + total w) <= D, so by Cauchy-Schwarz its charge is at least
  a (sum sqrt w)^2 / (D - a L). A set's answers start after its members end: for some time tau the members have D = tau
  and the answers D = T - tau. A search trace's charge is shared equally by the sets that hold it; each set takes its
  best tau (the charge is convex in tau). This is the cost of decoding long traces in fast steps.

The bound is the smallest T that satisfies all three. It does not depend on any choice of a schedule
(assignment, order, waiting, moving traces between engines). The critical path is the smallest T
that leaves every set a feasible tau."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spiral_mega.simulation.workload import EngineModel, SimProblem, prompt_parts

Array = NDArray[np.float64]
GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True, slots=True)
class Bound:
    """Lower bounds on the makespan, in seconds; `makespan` is the largest.

    `own_work` is W. `even` is not a bound but a reference: the makespan if W were spread evenly without idle time, and
    each engine did as many steps as the longest chain of a search trace and an answer to it has tokens.
    """

    work: float  # W and the steps that batch and cache force
    critical_path: float
    deadlines: float
    own_work: float
    even: float

    @property
    def makespan(self) -> float:
        return max(self.work, self.critical_path, self.deadlines)


def lower_bound(problems: Sequence[SimProblem], model: EngineModel, engines: int) -> Bound:
    """Compute the bound for `engines` engines."""
    totals = [_totals(i, problem, model) for i, problem in enumerate(problems)]
    decode, prefill, tokens, cache = (sum(column) for column in zip(*totals, strict=True))
    work = decode + prefill
    least_steps = max(tokens / model.max_sequences, cache / model.capacity)
    sets = _Sets(problems, model)
    critical = float(np.max(sets.fixed + sets.fastest_members + sets.fastest_answers))
    low = critical
    high = max(critical, work / engines) + 1.0
    while not sets.feasible(high, work, engines):
        high *= 2
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        if sets.feasible(middle, work, engines):
            high = middle
        else:
            low = middle
    even = work / engines + model.step * sets.longest_chain
    return Bound((work + model.step * least_steps) / engines, critical, low, work, even)


def _totals(
    index: int, problem: SimProblem, model: EngineModel
) -> tuple[float, float, float, float]:
    """Return seconds of decoding, seconds of distinct prefill, decoded tokens, and cache tokens summed over those."""
    traces = [(prompt_parts(index, problem, None), length) for length in problem.search]
    for l, answers in enumerate(problem.aggregation):
        traces += [(prompt_parts(index, problem, l), length) for length in answers]
    sharers = Counter(name for parts, _ in traces for name, _ in parts)
    decode = cache = prefill = 0.0
    seen = set()
    for parts, length in traces:
        context = 0
        for name, tokens in parts:
            if name not in seen:
                seen.add(name)
                prefill += model.prefill_time(context, tokens)
            context += tokens
            cache += length * tokens / sharers[name]
        decode += model.decode(context, length)
        cache += length * length / 2
    return decode, prefill, sum(length for _, length in traces), cache


class _Sets:
    """All sets as arrays: rows are sets; columns the members, or the answers."""

    def __init__(self, problems: Sequence[SimProblem], model: EngineModel) -> None:
        self.model = model
        rows = [(problem, l) for problem in problems for l in range(len(problem.sets))]
        held = [Counter(j for members in problem.sets for j in members) for problem in problems]
        counts = [
            count for problem, count in zip(problems, held, strict=True) for _ in problem.sets
        ]
        members = np.array([[p.search[j] for j in p.sets[l]] for p, l in rows], dtype=float)
        answers = np.array([p.aggregation[l] for p, l in rows], dtype=float)
        prompt = np.array([[p.prompt] for p, _ in rows], dtype=float)
        context = np.array([[sum(p.set_tokens(l))] for p, l in rows], dtype=float)
        last = members[:, -1:]  # at least the last member is in no cache when the set starts
        self.fixed = (self._prefill(0 * prompt, prompt) + self._prefill(context - last, last))[:, 0]
        self.members, self.answers = members, answers
        self.longest_chain = float(np.max(members.max(axis=1) + answers.max(axis=1)))
        self.fastest_members = np.max(self._fastest(members, prompt), axis=1)
        self.fastest_answers = np.max(self._fastest(answers, context), axis=1)
        share = np.array(
            [[1 / count[j] for j in p.sets[l]] for (p, l), count in zip(rows, counts, strict=True)]
        )
        self.member_weight = model.step * share * self._root_sum(members, prompt) ** 2
        self.answer_weight = model.step * self._root_sum(answers, context) ** 2

    def feasible(self, makespan: float, work: float, engines: int) -> bool:
        """Return whether the steps forced by the deadlines leave `work` seconds within `makespan`."""
        low = self.fastest_members
        high = makespan - self.fixed - self.fastest_answers
        if np.any(high < low):
            return False
        a, b = low.copy(), high.copy()
        for _ in range(50):
            left, right = b - GOLDEN * (b - a), a + GOLDEN * (b - a)
            better = self._charge(left, makespan) < self._charge(right, makespan)
            a, b = np.where(better, a, left), np.where(better, right, b)
        charge = float(np.sum(self._charge((a + b) / 2, makespan)))
        return work + charge <= engines * makespan

    def _charge(self, tau: Array, makespan: float) -> Array:
        step = self.model.step
        rest = (makespan - self.fixed - tau)[:, None]
        return np.asarray(
            np.sum(self.member_weight / (tau[:, None] - step * self.members), axis=1)
            + np.sum(self.answer_weight / (rest - step * self.answers), axis=1)
        )

    def _prefill(self, start: Array, tokens: Array) -> Array:
        model = self.model
        return tokens * (
            model.prefill + model.pair * (start + tokens / 2) + model.step / model.chunk
        )

    def _fastest(self, length: Array, context: Array) -> Array:
        model = self.model
        return length * (model.step + model.sequence + model.kv * (context + length / 2))

    def _root_sum(self, length: Array, context: Array) -> Array:
        """Integrate sqrt(w(u)) over a trace."""
        b, c = self.model.sequence, self.model.kv
        return (2 / (3 * c)) * ((b + c * (context + length)) ** 1.5 - (b + c * context) ** 1.5)
