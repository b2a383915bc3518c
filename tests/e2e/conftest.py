from __future__ import annotations

import pytest

from tests.e2e.runs import TrainingRun


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    """A run of two ranks and five steps, to its end. Its folder is not to be changed: see `runs.copied`."""
    return TrainingRun(tmp_path_factory.mktemp("undisturbed") / "whole").finish()
