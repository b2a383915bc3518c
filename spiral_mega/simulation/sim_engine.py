"""Fluid model of an engine with continuous batching: between two events its batch is constant and advances together."""

from __future__ import annotations

import math
from collections import Counter, deque
from heapq import heappop, heappush
from typing import Any

from spiral_mega.simulation.workload import EngineModel

EPSILON = 1e-6  # in steps or tokens: closer than this counts as reached


class SimSequence:
    """One trace to decode: `length` tokens after a prompt of (name, tokens) parts.

    A part's name identifies its whole prefix, so equal names mean equal keys and values. A lower
    `rank` is admitted first.
    """

    __slots__ = ("done", "ends_at", "key", "length", "prompt", "prompt_tokens", "rank")

    def __init__(
        self, key: tuple[Any, ...], length: int, prompt: list[tuple[Any, int]], rank: float = 0.0
    ) -> None:
        self.key, self.length, self.prompt, self.rank = key, length, prompt, rank
        self.prompt_tokens = sum(tokens for _, tokens in prompt)
        self.done = 0.0
        self.ends_at = -1.0  # in the engine's steps; negative while it is not decoding

    @property
    def context(self) -> float:
        """Return the tokens of context its next step reads, as of when it last started decoding."""
        return self.prompt_tokens + self.done


class Engine:
    """Simulates one engine; times in seconds, `steps` counts decoding steps including fractions.

    Prefill is chunked and shares its steps with decoding. A prompt part that a live sequence holds
    is neither computed nor stored again. When the cache is full, the sequence admitted last is
    preempted and recomputed later; no other is admitted until a sequence has left.
    """

    def __init__(self, model: EngineModel, now: float = 0.0) -> None:
        self.model, self.now = model, now
        self.steps = self.busy = self.decoded = self.peak = 0.0
        self.preemptions = 0
        self.waiting: list[tuple[float, int, SimSequence]] = []
        self.admitted: dict[
            SimSequence, float
        ] = {}  # tokens to prefill of each, in order of admission
        self.prefilling: deque[SimSequence] = deque()
        self.decoding: list[
            tuple[float, int, SimSequence]
        ] = []  # a heap; entries whose time is not ends_at are stale
        self.batch = 0
        self.reads = self.stored = 0.0  # tokens of context read per step, and stored in the cache
        self.prompt_users: Counter[Any] = Counter()
        self.prefill_steps = self.prefill_cost = (
            0.0  # of the first prefill: steps left, and seconds it adds to each
        )
        self.full = False  # a sequence was preempted, and none has left since
        self._serial = 0

    def add(self, sequence: SimSequence) -> None:
        """Queue a sequence at the engine's current time."""
        if sequence.prompt_tokens + sequence.length > self.model.capacity:
            raise ValueError(
                f"{sequence.key}: {sequence.prompt_tokens} + {sequence.length} tokens never fit the cache"
            )
        self._serial += 1
        heappush(self.waiting, (sequence.rank, self._serial, sequence))
        self._admit()

    def remove(self, sequence: SimSequence) -> None:
        """Take out a sequence with its tokens so far, to add it to another engine or cancel it."""
        if sequence in self.admitted:
            self._release(sequence)
            self._admit()
        else:
            self.waiting = sorted(entry for entry in self.waiting if entry[2] is not sequence)

    def sequences(self) -> list[SimSequence]:
        """Return all unfinished sequences: the admitted ones in order, then the waiting ones."""
        return [*self.admitted, *(sequence for _, _, sequence in sorted(self.waiting))]

    def demand(self) -> float:
        """Return the tokens of context a step would read if all unfinished sequences were decoding."""
        queued = sum(sequence.context for sequence in self.prefilling)
        return self.reads + queued + sum(sequence.context for _, _, sequence in self.waiting)

    def step_time(self) -> float:
        """Return the seconds that a step takes now."""
        model = self.model
        prefill = self.prefill_cost if self.prefilling else 0.0
        return model.step + model.sequence * self.batch + model.kv * self.reads + prefill

    def next_event(self) -> float:
        """Return the time of the next change if nothing is added; infinity if idle."""
        if not self.admitted:
            return math.inf
        steps = self._steps_to_event()
        return self.now + steps * self.step_time() + self.model.kv * self.batch * steps * steps / 2

    def advance(self, time: float) -> list[SimSequence]:
        """Advance to `time`, at most the next event; return the sequences that end there."""
        if self.admitted and time > self.now:
            elapsed = time - self.now
            start, slope = self.step_time(), self.model.kv * self.batch
            self._move(2 * elapsed / (start + math.sqrt(start * start + 2 * slope * elapsed)))
            self.busy += elapsed
        self.now = time
        return self._finish_reached()

    def _steps_to_event(self) -> float:
        steps = math.inf
        self._drop_stale()
        if self.decoding:
            steps = self.decoding[0][0] - self.steps
            steps = min(steps, (self.model.capacity - self.stored) / self.batch)
        if self.prefilling:
            steps = min(steps, self.prefill_steps)
        return max(steps, 0.0)

    def _move(self, steps: float) -> None:
        grown = self.batch * steps
        self.steps += steps
        self.decoded += grown
        self.reads += grown
        self.stored += grown
        self.prefill_steps -= steps
        self.peak = max(self.peak, self.stored)

    def _finish_reached(self) -> list[SimSequence]:
        ended = []
        self._drop_stale()
        while self.decoding and self.decoding[0][0] <= self.steps + EPSILON:
            sequence = heappop(self.decoding)[2]
            self._release(sequence)
            self.decoded += sequence.length - sequence.done
            sequence.done = float(sequence.length)
            ended.append(sequence)
            self._drop_stale()
        while self.prefilling and self.prefill_steps <= EPSILON:
            self._decode(self.prefilling.popleft())
            self._next_prefill()
        while len(self.admitted) > 1 and self.batch and self.stored > self.model.capacity - EPSILON:
            victim = next(reversed(self.admitted))
            self._release(victim)
            self.full = True
            self._serial += 1
            heappush(
                self.waiting, (victim.rank, -self._serial, victim)
            )  # before others of its rank
            self.preemptions += 1
        self._admit()
        return ended

    def _admit(self) -> None:
        while self.waiting and len(self.admitted) < self.model.max_sequences and not self.full:
            sequence = self.waiting[0][2]
            fresh = (
                sum(tokens for name, tokens in sequence.prompt if name not in self.prompt_users)
                + sequence.done
            )
            if self.stored + fresh > self.model.capacity:
                return
            heappop(self.waiting)
            self.prompt_users.update(name for name, _ in sequence.prompt)
            self.stored += fresh
            self.peak = max(self.peak, self.stored)
            self.admitted[sequence] = fresh
            self.prefilling.append(sequence)
            if len(self.prefilling) == 1:
                self._next_prefill()
                while self.prefilling and self.prefill_steps <= EPSILON:
                    self._decode(self.prefilling.popleft())
                    self._next_prefill()

    def _next_prefill(self) -> None:
        if self.prefilling:
            sequence = self.prefilling[0]
            fresh = self.admitted[sequence]
            start = sequence.context - fresh
            self.prefill_steps = fresh / self.model.chunk
            self.prefill_cost = (
                self.model.prefill_time(start, fresh) / self.prefill_steps if fresh else 0.0
            )

    def _decode(self, sequence: SimSequence) -> None:
        self._serial += 1
        sequence.ends_at = self.steps + sequence.length - sequence.done
        heappush(self.decoding, (sequence.ends_at, self._serial, sequence))
        self.batch += 1
        self.reads += sequence.context

    def _release(self, sequence: SimSequence) -> None:
        """Remove an admitted sequence and free the cache that only it used."""
        del self.admitted[sequence]
        self.full = False
        if sequence.ends_at >= 0:
            sequence.done = sequence.length - (sequence.ends_at - self.steps)
            sequence.ends_at = -1.0
            self.batch -= 1
            self.reads -= sequence.context
        else:
            first = self.prefilling[0] is sequence
            self.prefilling.remove(sequence)
            if first:
                self._next_prefill()
        self.stored -= sequence.done
        for name, tokens in sequence.prompt:
            self.prompt_users[name] -= 1
            if not self.prompt_users[name]:
                del self.prompt_users[name]
                self.stored -= tokens
        if not self.admitted:
            self.reads = self.stored = 0.0  # drop accumulated rounding

    def _drop_stale(self) -> None:
        def stale(ends_at: float, _: int, sequence: SimSequence) -> bool:
            return sequence not in self.admitted or sequence.ends_at != ends_at

        while self.decoding and stale(*self.decoding[0]):
            heappop(self.decoding)
