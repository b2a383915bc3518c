"""A process that exits through `skip_teardown` keeps its status and exit handlers, and gloo cannot abort it."""

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
    """Have gloo on the first rank need the interpreter, to release a tensor, while that rank exits and holds it."""
    if runtime.rank == 0:
        held.append(
            dist.group.WORLD
        )  # as FSDP2 keeps it: otherwise its threads would be waited for
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
def test_a_process_exits_with_its_status_its_handlers_and_all_its_output(last, status, error):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(last)], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (status, "main\nhandler\n")
    assert error in done.stderr
    assert bool(error) == bool(done.stderr)


@pytest.mark.parametrize(("output", "status"), [(">&-", 0), ("> /dev/full", 120)])
def test_closed_or_full_output_gives_the_status_that_python_gives(output, status):
    done = subprocess.run(
        f'"$PYTHON" -c "$SCRIPT" {output}', shell=True, capture_output=True, text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "", "PYTHON": sys.executable, "SCRIPT": SCRIPT.format("pass")},
    )  # fmt: skip
    assert done.returncode == status
    assert bool(status) == ("No space left" in done.stderr)
