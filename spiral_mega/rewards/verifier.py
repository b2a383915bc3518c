"""Rewards of responses, computed in processes that may hang, crash or run out of memory without
harm.

submit -> _dispatch -> a verifier process (rewards.worker) -> _on_done -> Future[Verdict]
              ^                                                  |
              +------------ once more if the pool broke ---------+
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from pebble import ProcessPool

from spiral_mega.process.signals import block_signals
from spiral_mega.rewards import worker
from spiral_mega.rewards.answers import normalize_answer
from spiral_mega.rewards.registry import check_verifier_name
from spiral_mega.rewards.spawn import MainlessContext
from spiral_mega.traces import Problem

if TYPE_CHECKING:  # verifier processes import this module, and start sooner without pydantic
    from spiral_mega.config import RewardsConfig

Status = Literal["ok", "timeout", "crash", "error"]
STATUSES: tuple[Status, ...] = ("ok", "timeout", "crash", "error")
WORKER_MEMORY_BYTES = 2 * 1024**3


@dataclass(frozen=True, slots=True)
class Verdict:
    """A reward and its status; `detail` gives the reason when `status` is not "ok" (the reward is
    then 0).

    timeout: past the time limit. crash: the process died. error: the verifier raised (MemoryError
    included) or returned something other than a finite number.
    """

    reward: float
    status: Status
    detail: str = ""


@dataclass(eq=False, slots=True)
class _Task:
    """One verification: the arguments of `worker.run`, the future verdict, and how often it was dispatched."""

    arguments: tuple[str, str, tuple[str, ...]]
    verdict: Future[Verdict] = field(default_factory=Future)
    attempts: int = 0


class VerifierPool:
    """A pool of `workers` verifier processes; each verification is limited to `time_limit_s`
    seconds of wall clock.

    A process that exceeds the limit is killed and replaced. The clock starts when a process takes
    the task, after its imports: `verifiers` are loaded beforehand, others within the limit of their
    first task. Processes start at once, in the background. Thread-safe. Use as a context manager,
    or call `close`.
    """

    def __init__(
        self, time_limit_s: float = 5.0, workers: int = 2, verifiers: Sequence[str] = ("math",)
    ) -> None:
        if not time_limit_s > 0 or workers < 1:
            raise ValueError(
                f"time_limit_s is {time_limit_s} and workers {workers}: both must be positive"
            )
        self.time_limit_s = time_limit_s
        self.workers = workers
        self._preloaded = tuple(dict.fromkeys(verifiers))
        for name in self._preloaded:
            check_verifier_name(name)
        self._checked = set(self._preloaded)
        self._counts: Counter[str] = Counter()
        self._pending: set[_Task] = set()
        self._lock = Lock()
        self._closed = False
        # One thread starts all processes and outlives them: the kernel ends a child with the thread
        # that started it.
        self._manager = ThreadPoolExecutor(1, "verifier-manager", initializer=block_signals)
        self._pool: ProcessPool | None = None
        self._manager.submit(self._start_pool)

    def submit(self, response: str, answer: Any, verifier: str = "math") -> Future[Verdict]:
        """Start to verify `response`. The future's result is a Verdict; it raises only if `close`
        comes first.

        `answer` is anything that `normalize_answer` accepts. Raises ValueError for a bad answer or
        verifier name, RuntimeError after `close`.
        """
        if verifier not in self._checked:
            check_verifier_name(verifier)
            self._checked.add(verifier)
        task = _Task((verifier, response, normalize_answer(answer)))
        task.verdict.set_running_or_notify_cancel()  # a verdict cannot be cancelled, so it is always set once
        with self._lock:
            if self._closed:
                raise RuntimeError("the VerifierPool is closed: create another")
            self._pending.add(task)
            self._manager.submit(self._dispatch, task)
        return task.verdict

    def verify(
        self, responses: Sequence[str], answers: Sequence[Any], verifier: str = "math"
    ) -> list[Verdict]:
        """Return the verdicts on `responses`, in order; answers[i] is the ground truth of responses[i]."""
        if len(responses) != len(answers):
            raise ValueError(
                f"{len(responses)} responses but {len(answers)} answers: give one answer a response"
            )
        pairs = zip(responses, answers, strict=True)
        futures = [self.submit(response, answer, verifier) for response, answer in pairs]
        return [future.result() for future in futures]

    @property
    def counts(self) -> dict[str, int]:
        """The number of verdicts so far by status: ok, timeout, crash, error."""
        with self._lock:
            return {status: self._counts[status] for status in STATUSES}

    def close(self) -> None:
        """Stop all processes. The futures of unfinished verifications raise RuntimeError."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            pending = list(self._pending)
        for task in pending:  # before their processes end, which would read as crashes
            if self._claim(task):
                task.verdict.set_exception(
                    RuntimeError("the VerifierPool was closed before this verification ended")
                )
        self._manager.submit(self._stop_pool).result()
        self._manager.shutdown()

    def __enter__(self) -> VerifierPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # The methods below run in the manager thread or as callbacks of pebble's threads; _claim runs
    # in any thread.

    def _start_pool(self) -> ProcessPool:
        self._pool = ProcessPool(
            max_workers=self.workers,
            initializer=worker.start,
            initargs=(os.getpid(), self._preloaded, WORKER_MEMORY_BYTES),
            context=MainlessContext(),
        )
        _ = self._pool.active  # starts the processes
        return self._pool

    def _stop_pool(self) -> None:
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None

    def _dispatch(self, task: _Task) -> None:
        if self._closed:
            return
        task.attempts += 1
        try:
            pool = self._pool
            if (
                pool is None or not pool.active
            ):  # its processes died while idle: out of memory, or an operator's kill
                self._stop_pool()
                pool = self._start_pool()
            future = pool.schedule(worker.run, args=task.arguments, timeout=self.time_limit_s)
        except (
            Exception
        ) as error:  # no process can be started: training continues, and the counts show it
            self._complete(task, Verdict(0.0, "crash", f"{type(error).__name__}: {error}"))
        else:
            future.add_done_callback(lambda done: self._on_done(task, done))

    def _on_done(self, task: _Task, done: Future[tuple[float, Status, str]]) -> None:
        error = done.exception()
        if error is None:
            self._complete(task, Verdict(*done.result()))
        elif isinstance(error, TimeoutError):
            self._complete(task, Verdict(0.0, "timeout", f"took longer than {self.time_limit_s} s"))
        elif isinstance(error, BrokenProcessPool) and task.attempts == 1:
            with suppress(RuntimeError):  # the manager thread has ended: `close` completes the task
                self._manager.submit(self._dispatch, task)
        else:
            self._complete(task, Verdict(0.0, "crash", f"{type(error).__name__}: {error}"))

    def _complete(self, task: _Task, verdict: Verdict) -> None:
        if self._claim(task):
            with self._lock:
                self._counts[verdict.status] += 1
            task.verdict.set_result(verdict)

    def _claim(self, task: _Task) -> bool:
        """Return whether the caller is the first to complete `task`."""
        with self._lock:
            found = task in self._pending
            self._pending.discard(task)
            return found


def verify(
    responses: Sequence[str],
    answers: Sequence[Any],
    verifier: str = "math",
    time_limit_s: float = 5.0,
    workers: int = 2,
) -> list[float]:
    """Return the rewards of `responses`, in order, as `VerifierPool.verify`; starts processes for it (1 to 2 s)."""
    with VerifierPool(time_limit_s, workers, (verifier,)) as pool:
        return [verdict.reward for verdict in pool.verify(responses, answers, verifier)]


def make_verifier_pool(config: RewardsConfig, problems: Iterable[Problem]) -> VerifierPool:
    """Start the verifier processes, with every verifier that these problems name loaded before any time limit runs."""
    names = sorted({problem.verifier for problem in problems})
    return VerifierPool(config.time_limit_s, config.workers, names)
