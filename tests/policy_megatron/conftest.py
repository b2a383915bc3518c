import pytest

from tests.policy_megatron.cases import Lab


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """Every multi-rank case, run on 2 and on 4 ranks: two launches for all the tests of this folder."""
    lab = Lab(tmp_path_factory.mktemp("megatron"))
    for world_size in (2, 4):
        lab.run(world_size)
    return lab
