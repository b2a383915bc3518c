import fcntl
import os
from pathlib import Path

import pytest
import torch

from tests.policy_megatron.cases import Lab


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whichever test asks first for the lab waits for all of its cases."""
    for item in items:
        if item.path.parent == Path(__file__).parent and "lab" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(1800))


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """Every multi-rank case, run on 2 and on 4 ranks: two launches for all the tests of this folder, whatever number of
    pytest-xdist's workers share them."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    lab = Lab(folder / "megatron")
    lab.folder.mkdir(exist_ok=True)
    results = lab.folder / "results.pt"
    with open(lab.folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if results.exists():
            lab.results = torch.load(results, weights_only=False)
        else:
            for world_size in (2, 4):
                lab.run(world_size)
            torch.save(lab.results, results)
    return lab
