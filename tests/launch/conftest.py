from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.launch.cluster import Cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("slurm")) as started:
        yield started
