"""Pools of real verifier processes for the tests that only ask them questions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from spiral_mega.rewards import VerifierPool

TIME_LIMIT_S = 3.0


@pytest.fixture(scope="session")
def verifier() -> Iterator[VerifierPool]:
    with VerifierPool(TIME_LIMIT_S, workers=2, verifiers=("math", "exact", "arithmetic")) as shared:
        yield shared


@pytest.fixture(scope="session")
def light_verifier() -> Iterator[VerifierPool]:
    """Without the mathematics, so that its processes are quick to replace."""
    with VerifierPool(TIME_LIMIT_S, workers=2, verifiers=("exact",)) as shared:
        yield shared
