"""Rewards of responses, computed in processes that may hang, crash or run out of memory without harm."""

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

if TYPE_CHECKING:  # verifier processes import this module: without pydantic they start sooner
    from spiral_mega.config import RewardsConfig

Status = Literal["ok", "timeout", "crash", "error"]
STATUSES: tuple[Status, ...] = ("ok", "timeout", "crash", "error")
WORKER_MEMORY_BYTES = 2 * 1024**3


@dataclass(frozen=True, slots=True)
class Verdict:
    """A reward and how it came about; `detail` says why when `status` is not "ok" (the reward is then 0).

    timeout: past the time limit. crash: the process died. error: the verifier raised (MemoryError included) or
    returned something other than a finite number.
    """

    reward: float
    status: Status
    detail: str = ""


@dataclass(eq=False, slots=True)
class _Job:
    arguments: tuple[str, str, tuple[str, ...]]
    verdict: Future[Verdict] = field(default_factory=Future)
    tried: int = 0


class VerifierPool:
    """A pool of `workers` verifier processes, each verification bounded by `time_limit_s` seconds of wall clock.

    A process that exceeds the limit is killed and replaced. The clock starts when a process takes the task,
    after its imports: `kinds` are those to load beforehand (others load within their first task's limit).
    Processes start at once, in the background. Thread-safe. Use as a context manager, or call `close`.
    """

    def __init__(self, time_limit_s: float = 5.0, workers: int = 2, kinds: Sequence[str] = ("math",)) -> None:
        if not time_limit_s > 0 or workers < 1:
            raise ValueError(f"time_limit_s is {time_limit_s} and workers {workers}: both must be positive")
        self.time_limit_s = time_limit_s
        self.workers = workers
        self._kinds = tuple(dict.fromkeys(kinds))
        for kind in self._kinds:
            check_verifier_name(kind)
        self._checked = set(self._kinds)
        self._counts: Counter[str] = Counter()
        self._unsettled: set[_Job] = set()
        self._lock = Lock()
        self._closed = False
        # One thread starts all processes and outlives them: the kernel ends a child with the thread that made it.
        self._keeper = ThreadPoolExecutor(1, "verifier-keeper", initializer=block_signals)
        self._pool: ProcessPool | None = None
        self._keeper.submit(self._start_pool)

    def submit(self, response: str, answer: Any, kind: str = "math") -> Future[Verdict]:
        """Start to verify `response`; the future's result is a Verdict, never an exception, unless `close` comes first.

        `answer` is anything `normalize_answer` takes. Raises ValueError for a bad answer or kind, RuntimeError
        after `close`.
        """
        if kind not in self._checked:
            check_verifier_name(kind)
            self._checked.add(kind)
        job = _Job((kind, response, normalize_answer(answer)))
        job.verdict.set_running_or_notify_cancel()  # a verdict cannot be cancelled, so it is always set once
        with self._lock:
            if self._closed:
                raise RuntimeError("the VerifierPool is closed: create another")
            self._unsettled.add(job)
            self._keeper.submit(self._dispatch, job)
        return job.verdict

    def verify(self, responses: Sequence[str], answers: Sequence[Any], kind: str = "math") -> list[Verdict]:
        """The verdicts on `responses`, in their order; answers[i] is the ground truth for responses[i]."""
        if len(responses) != len(answers):
            raise ValueError(f"{len(responses)} responses but {len(answers)} answers: give one answer a response")
        futures = [self.submit(response, answer, kind) for response, answer in zip(responses, answers, strict=True)]
        return [future.result() for future in futures]

    @property
    def counts(self) -> dict[str, int]:
        """Verdicts so far by status: ok, timeout, crash, error."""
        with self._lock:
            return {status: self._counts[status] for status in STATUSES}

    def close(self) -> None:
        """Stop all processes. Verifications that have not ended raise RuntimeError from their futures."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            open_jobs = list(self._unsettled)
        for job in open_jobs:  # before their processes end, which would read as crashes
            if self._take(job):
                job.verdict.set_exception(RuntimeError("the VerifierPool was closed before this verification ended"))
        self._keeper.submit(self._stop_pool).result()
        self._keeper.shutdown()

    def __enter__(self) -> VerifierPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # All below but _take run in the keeper's thread, or are called back from pebble's.

    def _start_pool(self) -> ProcessPool:
        self._pool = ProcessPool(
            max_workers=self.workers,
            initializer=worker.start,
            initargs=(os.getpid(), self._kinds, WORKER_MEMORY_BYTES),
            context=MainlessContext(),
        )
        _ = self._pool.active  # starts the processes
        return self._pool

    def _stop_pool(self) -> None:
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None

    def _dispatch(self, job: _Job) -> None:
        if self._closed:
            return
        job.tried += 1
        try:
            pool = self._pool
            if pool is None or not pool.active:  # its processes died while idle: out of memory, or an operator's kill
                self._stop_pool()
                pool = self._start_pool()
            future = pool.schedule(worker.run, args=job.arguments, timeout=self.time_limit_s)
        except Exception as error:  # no process can be started: training goes on, and the counts show it
            self._conclude(job, Verdict(0.0, "crash", f"{type(error).__name__}: {error}"))
        else:
            future.add_done_callback(lambda done: self._settle(job, done))

    def _settle(self, job: _Job, done: Future[tuple[float, Status, str]]) -> None:
        error = done.exception()
        if error is None:
            self._conclude(job, Verdict(*done.result()))
        elif isinstance(error, TimeoutError):
            self._conclude(job, Verdict(0.0, "timeout", f"took longer than {self.time_limit_s} s"))
        elif isinstance(error, BrokenProcessPool) and job.tried == 1:
            with suppress(RuntimeError):  # the keeper has shut down: `close` settles the job
                self._keeper.submit(self._dispatch, job)
        else:
            self._conclude(job, Verdict(0.0, "crash", f"{type(error).__name__}: {error}"))

    def _conclude(self, job: _Job, verdict: Verdict) -> None:
        if self._take(job):
            with self._lock:
                self._counts[verdict.status] += 1
            job.verdict.set_result(verdict)

    def _take(self, job: _Job) -> bool:
        """Whether the caller is the one to settle `job`."""
        with self._lock:
            found = job in self._unsettled
            self._unsettled.discard(job)
            return found


def verify(
    responses: Sequence[str], answers: Sequence[Any], kind: str = "math", time_limit_s: float = 5.0, workers: int = 2
) -> list[float]:
    """The rewards of `responses`, in order, as `VerifierPool.verify` gives them; starts processes for it (1 to 2 s)."""
    with VerifierPool(time_limit_s, workers, (kind,)) as verifier:
        return [verdict.reward for verdict in verifier.verify(responses, answers, kind)]


def make_verifier_pool(config: RewardsConfig, problems: Iterable[Problem]) -> VerifierPool:
    """The verifier processes, with all that these problems need loaded before any limit runs."""
    kinds = sorted({problem.verifier for problem in problems})
    return VerifierPool(config.time_limit_s, config.workers, kinds)
