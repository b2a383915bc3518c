"""The pool against verifiers that hang, die, leak and lie: real processes throughout."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest

from spiral_mega.rewards import Verdict, VerifierPool, verify

SLACK_S = 2.0  # pebble looks for expired tasks every 0.1 s; the rest is for a busy machine
RIGHT = ("\\boxed{\\sqrt{8}}", "2\\sqrt{2}")
SAME = ("5", "5", "exact")


def test_verify_gives_rewards_in_the_order_of_its_inputs() -> None:
    answers = ["5", 5.0, ["4", "5"], "6", 5]
    assert verify(["\\boxed{5}"] * 5, answers) == [1.0, 1.0, 1.0, 0.0, 1.0]


def test_results_keep_the_order_of_inputs_whatever_finishes_first(
    light_verifier: VerifierPool,
) -> None:
    waits = ["0.4", "0", "0.2", "0"]
    light_verifier.verify(waits, ["x"] * 4, "bad_verifiers:sleeps")
    responses = ["r" * n for n in range(200)]
    verdicts = light_verifier.verify(responses, ["x"] * 200, "bad_verifiers:length")
    assert [verdict.reward for verdict in verdicts] == [float(n) for n in range(200)]


def test_a_hang_costs_the_limit_and_the_next_task_is_served_by_a_warm_replacement() -> None:
    # The limit is shorter than a process takes to load the mathematics: a start that counted would time out every task.
    with VerifierPool(0.4, workers=1) as verifier:
        assert verifier.submit(*RIGHT).result() == Verdict(1.0, "ok")
        for kind in ("bad_verifiers:sleeps_forever", "bad_verifiers:holds_the_interpreter"):
            began = time.perf_counter()
            verdict = verifier.submit("", "x", kind).result()
            assert (verdict.reward, verdict.status) == (0.0, "timeout")
            assert 0.4 <= time.perf_counter() - began < 0.4 + SLACK_S
            assert verifier.submit(*RIGHT).result() == Verdict(1.0, "ok")
        assert verifier.counts == {"ok": 3, "timeout": 2, "crash": 0, "error": 0}


@pytest.mark.parametrize(
    ("kind", "response", "status"),
    [
        ("exits", "0", "crash"),
        ("exits", "3", "crash"),
        ("segfaults", "", "crash"),
        ("raises", "memory", "error"),
        ("raises", "exit", "error"),
        ("raises", "recursion", "error"),
        ("raises", "timeout", "error"),
        ("allocates_64_gib", "", "error"),
        ("returns", "nan", "error"),
        ("returns", "inf", "error"),
        ("returns", "text", "error"),
        ("returns", "none", "error"),
    ],
)
def test_a_failing_verifier_scores_zero_is_counted_and_stops_nothing(
    light_verifier: VerifierPool, kind: str, response: str, status: str
) -> None:
    before = light_verifier.counts
    began = time.perf_counter()
    verdict = light_verifier.submit(response, "x", f"bad_verifiers:{kind}").result()
    assert time.perf_counter() - began < light_verifier.time_limit_s + SLACK_S
    assert (verdict.reward, verdict.status) == (0.0, status)
    assert verdict.detail
    assert light_verifier.submit(*SAME).result() == Verdict(1.0, "ok")
    after = light_verifier.counts
    assert after == before | {"ok": before["ok"] + 1, status: before[status] + 1}


def test_failures_among_many_tasks_cost_only_their_own_rewards(
    light_verifier: VerifierPool,
) -> None:
    fatal = ("1", "x", "bad_verifiers:exits")
    futures = [light_verifier.submit(*(fatal if i % 10 == 5 else SAME)) for i in range(40)]
    assert [future.result().reward for future in futures] == [float(i % 10 != 5) for i in range(40)]


def test_true_is_a_reward_of_one(light_verifier: VerifierPool) -> None:
    assert light_verifier.submit("true", "x", "bad_verifiers:returns").result() == Verdict(
        1.0, "ok"
    )


def test_processes_are_light_confined_and_their_own_session(light_verifier: VerifierPool) -> None:
    assert light_verifier.submit("", "x", "bad_verifiers:heavy_modules").result().reward == 0.0
    assert light_verifier.submit("", "x", "bad_verifiers:core_limit").result().reward == 0.0
    assert light_verifier.submit("", "x", "bad_verifiers:session_id").result().reward != os.getsid(
        0
    )


def test_idle_processes_may_all_be_killed() -> None:
    with VerifierPool(2.0, workers=1, verifiers=()) as verifier:
        for _ in range(2):
            pid = int(verifier.submit("", "x", "bad_verifiers:process_id").result().reward)
            os.kill(pid, signal.SIGKILL)
            time.sleep(0.5)
            assert verifier.submit(*SAME).result(20) == Verdict(1.0, "ok")


def test_a_signal_that_asks_ranks_to_stop_ends_no_verifier(light_verifier: VerifierPool) -> None:
    """Slurm sends it to every process of a step; a verifier that died of it would score what is being judged 0."""
    pid = int(light_verifier.submit("", "x", "bad_verifiers:process_id").result().reward)
    os.kill(pid, signal.SIGUSR1)
    time.sleep(0.2)
    assert psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    found = [light_verifier.submit("", "x", "bad_verifiers:process_id").result() for _ in range(8)]
    assert {verdict.status for verdict in found} == {"ok"}


def test_closing_fails_what_is_still_pending() -> None:
    with VerifierPool(60.0, workers=1, verifiers=()) as verifier:
        verifier.submit(*SAME).result()
        hanging = verifier.submit("", "x", "bad_verifiers:sleeps_forever")
        waiting = [verifier.submit("w" * 50_000, "x", "bad_verifiers:length") for _ in range(200)]
        began = time.perf_counter()
    assert time.perf_counter() - began < 10
    for future in (hanging, *waiting):
        with pytest.raises(RuntimeError, match="closed before"):
            future.result(0)
    with pytest.raises(RuntimeError, match="create another"):
        verifier.submit(*SAME)


def test_misuse_is_refused_in_the_caller(verifier: VerifierPool) -> None:
    with pytest.raises(ValueError, match="there is no verifier 'maths'"):
        verifier.submit("\\boxed{5}", "5", "maths")
    with pytest.raises(ValueError, match="is empty"):
        verifier.submit("\\boxed{5}", "")
    with pytest.raises(ValueError, match="2 responses but 1 answers"):
        verifier.verify(["a", "b"], ["a"])
    with pytest.raises(ValueError, match="must be positive"):
        VerifierPool(0.0)
    with pytest.raises(ValueError, match="must be positive"):
        VerifierPool(1.0, workers=0)
