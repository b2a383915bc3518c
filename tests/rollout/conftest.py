"""A process group of one, and verifier processes, for the tests that need no second rank."""

from collections.abc import Iterator

import pytest

from spiral_mega.distributed.runtime import Runtime, start_runtime
from spiral_mega.rewards import VerifierPool


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with start_runtime() as alone:
        yield alone


@pytest.fixture(scope="module")
def verifier() -> Iterator[VerifierPool]:
    with VerifierPool(time_limit_s=3.0, workers=1, verifiers=("exact",)) as shared:
        yield shared
