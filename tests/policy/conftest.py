import pytest

from tests.policy.cases import Lab


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """Every multi-rank case, run on 2, 1 and 4 ranks: three launches for all the tests of this folder."""
    lab = Lab(tmp_path_factory.mktemp("policy"))
    for world_size in (2, 1, 4):  # two ranks write the checkpoints that the others go on from
        lab.run(world_size)
    return lab
