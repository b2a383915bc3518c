"""Calls beside the caller: in order, their failures told, and seen for what they are when a run hangs."""

import sys
import threading
import time
from concurrent.futures import Future
from threading import Event

import pytest

from spiral_mega.distributed.background import BackgroundCollectives
from spiral_mega.process.watchdog import _where


def test_calls_are_made_in_order_while_the_caller_goes_on():
    go, seen = Event(), []
    with BackgroundCollectives() as beside:
        assert beside.submit(go.wait, 10) == 1
        assert [beside.submit(seen.append, i) for i in range(3)] == [2, 3, 4]
        assert seen == []
        go.set()
        assert beside.wait() is True
    assert seen == [0, 1, 2]


def test_after_a_failure_nothing_more_is_called_and_each_wait_tells_of_it():
    seen, told = [], []
    with BackgroundCollectives() as beside:
        beside.submit(divmod, 1, 0)
        beside.submit(seen.append, 1)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError) as error:
                beside.wait()
            told.append(error.value)
    assert seen == []
    assert told[0] is told[1]


def test_a_failure_that_nobody_waited_for_is_raised_at_the_end():
    with pytest.raises(ZeroDivisionError), BackgroundCollectives() as beside:
        beside.submit(divmod, 1, 0)


def test_an_error_outside_is_not_held_up_by_a_call_without_an_end():
    go = Event()

    def fails():
        with BackgroundCollectives() as beside:
            beside.submit(go.wait)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    go.set()


@pytest.mark.parametrize(("waiting", "for_others"), [("beside", True), ("verdict", False)])
def test_a_rank_that_waits_for_an_exchange_is_told_from_one_that_waits_for_itself(waiting, for_others):
    go, verdict = Event(), Future()

    def samples():
        with BackgroundCollectives() as beside:
            beside.submit(go.wait)
            (beside.wait if waiting == "beside" else verdict.result)()

    thread = threading.Thread(target=samples, daemon=True)
    thread.start()
    time.sleep(0.2)
    place, waits = _where(sys._current_frames()[thread.ident])
    go.set()
    verdict.set_result(None)
    thread.join()
    assert waits == for_others
    assert ("(wait)" if for_others else "(samples)") in place
    assert "threading.py" not in place
