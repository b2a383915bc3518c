"""A process that ends by `skip_teardown` keeps its status and its exit handlers, and cannot be aborted by gloo."""

import atexit
import os
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from spiral_mega.distributed.runtime import Runtime
from tests.support.ranks import run_ranks

held: list[Any] = []

SCRIPT = """
import atexit, sys
from spiral_mega.process.exit import skip_teardown
with skip_teardown():
    atexit.register(print, "handler")
    print("main")
    {}
"""


def leave_a_tensor_with_gloo(runtime: Runtime, _: Any) -> None:
    """Have the first rank's gloo want Python, to let go of a tensor, while that rank ends and does not let it."""
    if runtime.rank == 0:
        held.append(dist.group.WORLD)  # as FSDP2 keeps it: its threads would be waited for otherwise
        dist.all_reduce(torch.ones(1), async_op=True)  # until the other rank has gone
        atexit.register(be_busy, seconds=4)
    else:
        time.sleep(2)


def be_busy(seconds: float) -> None:
    sys.setswitchinterval(100)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def test_a_tensor_that_gloo_still_holds_does_not_abort_a_rank_that_ends():
    assert run_ranks(2, "tests.process.test_exit:leave_a_tensor_with_gloo") == [None, None]


@pytest.mark.parametrize(
    ("last", "status", "error"),
    [
        ("pass", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('what to do')", 1, "what to do"),
        ("raise ValueError('wrong')", 1, "ValueError: wrong"),
    ],
)
def test_a_process_ends_with_its_status_its_handlers_and_all_that_it_printed(last, status, error):
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(last)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (status, "main\nhandler\n")
    assert error in done.stderr
    assert bool(error) == bool(done.stderr)


@pytest.mark.parametrize(("output", "status"), [(">&-", 0), ("> /dev/full", 120)])
def test_output_that_goes_nowhere_ends_as_python_ends_by_itself(output, status):
    done = subprocess.run(
        f'"$PYTHON" -c "$SCRIPT" {output}', shell=True, capture_output=True, text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "", "PYTHON": sys.executable, "SCRIPT": SCRIPT.format("pass")},
    )  # fmt: skip
    assert done.returncode == status
    assert bool(status) == ("No space left" in done.stderr)
