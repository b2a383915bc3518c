"""A process group of one."""

from collections.abc import Iterator

import pytest

from spiral_mega.distributed.runtime import Runtime, start_runtime


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with start_runtime() as alone:
        yield alone
