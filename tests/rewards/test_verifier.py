"""The pool against verifiers that hang, die, leak and lie: real processes throughout."""

from __future__ import annotations

import os
import signal
import time

import pytest

from spiral_mega.rewards import Verdict, Verifier, verify

SLACK_S = 1.0  # pebble looks for expired tasks every 0.1 s; the rest is for a busy machine
RIGHT = ("\\boxed{5}", "5")


def test_verify_gives_rewards_in_the_order_of_its_inputs() -> None:
    answers = ["5", 5.0, ["4", "5"], "6", 5]
    assert verify(["\\boxed{5}"] * 5, answers) == [1.0, 1.0, 1.0, 0.0, 1.0]


def test_results_keep_the_order_of_inputs_whatever_finishes_first(verifier: Verifier) -> None:
    waits = ["0.4", "0", "0.2", "0"]
    verifier.verify(waits, ["x"] * 4, "bad_kinds:sleeps")
    responses = ["r" * n for n in range(200)]
    verdicts = verifier.verify(responses, ["x"] * 200, "bad_kinds:length")
    assert [verdict.reward for verdict in verdicts] == [float(n) for n in range(200)]


@pytest.mark.parametrize("kind", ["sleeps_forever", "holds_the_interpreter"])
def test_a_hang_costs_the_limit_and_the_next_task_is_served_by_a_warm_replacement(kind: str) -> None:
    # The limit is shorter than a start of the process, so a start that counted would time out every task.
    with Verifier(0.4, workers=1) as verifier:
        assert verifier.submit(*RIGHT).result() == Verdict(1.0, "ok")
        for _ in range(2):
            began = time.perf_counter()
            verdict = verifier.submit("", "x", f"bad_kinds:{kind}").result()
            assert (verdict.reward, verdict.status) == (0.0, "timeout")
            assert 0.4 <= time.perf_counter() - began < 0.4 + SLACK_S + 4.0  # the second waits for the replacement
            assert verifier.submit("\\boxed{\\sqrt{8}}", "2\\sqrt{2}").result() == Verdict(1.0, "ok")
        assert verifier.counts == {"ok": 3, "timeout": 2, "crash": 0, "error": 0}


@pytest.mark.parametrize(
    ("kind", "response", "status"),
    [
        ("exits", "0", "crash"),
        ("exits", "3", "crash"),
        ("segfaults", "", "crash"),
        ("raises", "memory", "error"),
        ("raises", "system exit", "error"),
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
    verifier: Verifier, kind: str, response: str, status: str
) -> None:
    before = verifier.counts
    began = time.perf_counter()
    verdict = verifier.submit(response, "x", f"bad_kinds:{kind}").result()
    assert time.perf_counter() - began < verifier.time_limit_s + SLACK_S
    assert (verdict.reward, verdict.status) == (0.0, status)
    assert verdict.detail
    assert verifier.submit(*RIGHT).result() == Verdict(1.0, "ok")
    after = verifier.counts
    assert after == before | {"ok": before["ok"] + 1, status: before[status] + 1}


def test_failures_among_many_tasks_cost_only_their_own_rewards(verifier: Verifier) -> None:
    futures = [
        verifier.submit("1", "x", "bad_kinds:exits") if i % 10 == 5 else verifier.submit(*RIGHT) for i in range(40)
    ]
    assert [future.result().reward for future in futures] == [float(i % 10 != 5) for i in range(40)]


def test_true_is_a_reward_of_one(verifier: Verifier) -> None:
    assert verifier.submit("true", "x", "bad_kinds:returns").result() == Verdict(1.0, "ok")


def test_processes_are_light_confined_and_their_own_session(verifier: Verifier) -> None:
    import torch  # noqa: F401 - the trainer has it loaded; its verifiers must not

    assert verifier.submit("", "x", "bad_kinds:heavy_modules").result().reward == 0.0
    assert verifier.submit("", "x", "bad_kinds:core_limit").result().reward == 0.0
    assert verifier.submit("", "x", "bad_kinds:session_id").result().reward != os.getsid(0)


def test_idle_processes_may_all_be_killed() -> None:
    with Verifier(2.0, workers=1) as verifier:
        for _ in range(2):
            pid = int(verifier.submit("", "x", "bad_kinds:process_id").result().reward)
            os.kill(pid, signal.SIGKILL)
            time.sleep(0.5)
            assert verifier.submit(*RIGHT).result(20) == Verdict(1.0, "ok")


def test_closing_settles_what_is_still_open() -> None:
    with Verifier(60.0, workers=1) as verifier:
        verifier.submit(*RIGHT).result()
        hanging = verifier.submit("", "x", "bad_kinds:sleeps_forever")
        waiting = [verifier.submit("w" * 50_000, "x", "bad_kinds:length") for _ in range(200)]
        began = time.perf_counter()
    assert time.perf_counter() - began < 10
    for future in (hanging, *waiting):
        with pytest.raises(RuntimeError, match="closed before"):
            future.result(0)
    with pytest.raises(RuntimeError, match="create another"):
        verifier.submit(*RIGHT)


def test_misuse_is_refused_in_the_caller(verifier: Verifier) -> None:
    with pytest.raises(ValueError, match="there is no verifier kind 'maths'"):
        verifier.submit("\\boxed{5}", "5", "maths")
    with pytest.raises(ValueError, match="is empty"):
        verifier.submit("\\boxed{5}", "")
    with pytest.raises(ValueError, match="2 responses but 1 answers"):
        verifier.verify(["a", "b"], ["a"])
    with pytest.raises(ValueError, match="must be positive"):
        Verifier(0.0)
    with pytest.raises(ValueError, match="must be positive"):
        Verifier(1.0, workers=0)
