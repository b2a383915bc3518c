"""Collectives on a background thread: in order, failures raised by `wait`, recognized when a run hangs."""

import sys
import threading
import time
from concurrent.futures import Future
from threading import Event

import pytest

from spiral_mega.distributed.background import BackgroundCollectives
from spiral_mega.process.watchdog import _position


def test_calls_run_in_order_while_the_caller_continues():
    go, seen = Event(), []
    with BackgroundCollectives() as background:
        assert background.submit(go.wait, 10) == 1
        assert [background.submit(seen.append, i) for i in range(3)] == [2, 3, 4]
        assert seen == []
        go.set()
        assert background.wait() is True
    assert seen == [0, 1, 2]


def test_after_a_failure_nothing_more_is_called_and_each_wait_raises_it():
    seen, raised = [], []
    with BackgroundCollectives() as background:
        background.submit(divmod, 1, 0)
        background.submit(seen.append, 1)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError) as error:
                background.wait()
            raised.append(error.value)
    assert seen == []
    assert raised[0] is raised[1]


def test_a_failure_that_nobody_waited_for_is_raised_at_the_end():
    with pytest.raises(ZeroDivisionError), BackgroundCollectives() as background:
        background.submit(divmod, 1, 0)


def test_an_error_in_the_caller_does_not_wait_for_a_call_that_never_ends():
    go = Event()

    def fails():
        with BackgroundCollectives() as background:
            background.submit(go.wait)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    go.set()


@pytest.mark.parametrize(("waiting", "for_others"), [("background", True), ("verdict", False)])
def test_a_rank_that_waits_for_others_is_distinguished_from_one_that_waits_for_itself(
    waiting, for_others
):
    go, verdict = Event(), Future()

    def samples():
        with BackgroundCollectives() as background:
            background.submit(go.wait)
            (background.wait if waiting == "background" else verdict.result)()

    thread = threading.Thread(target=samples, daemon=True)
    thread.start()
    time.sleep(0.2)
    position, waits = _position(sys._current_frames()[thread.ident])
    go.set()
    verdict.set_result(None)
    thread.join()
    assert waits == for_others
    assert ("(wait)" if for_others else "(samples)") in position
    assert "threading.py" not in position
