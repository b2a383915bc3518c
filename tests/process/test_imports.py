"""Objects created in `imports_without_gc` are never collected; objects created after it are, as before."""

import gc
import weakref

import pytest

from spiral_mega.process.imports import imports_without_gc


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def thawed():
    yield
    gc.unfreeze()
    gc.enable()


def test_only_objects_created_within_stay():
    with imports_without_gc():
        within = weakref.ref(Cycle())
    after = weakref.ref(Cycle())
    gc.collect()
    assert within() is not None
    assert after() is None


@pytest.mark.parametrize("enabled", [True, False])
def test_collection_is_off_within_and_restored_afterwards_also_when_an_import_fails(enabled):
    if not enabled:
        gc.disable()
    seen = []

    def fail() -> None:
        with imports_without_gc():
            seen.append(gc.isenabled())
            raise ImportError

    with pytest.raises(ImportError):
        fail()
    assert (seen, gc.isenabled()) == ([False], enabled)
