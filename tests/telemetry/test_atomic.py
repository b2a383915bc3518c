import json
from contextlib import suppress
from pathlib import Path

import pytest

from spiral_mega.telemetry.atomic import atomic_path, write_json_atomic


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_json_atomic(path, {"step": 1})
    with pytest.raises(TypeError):
        write_json_atomic(path, {"step": object()})
    with suppress(RuntimeError), atomic_path(path) as hidden:
        hidden.write_text("half of")
        raise RuntimeError
    assert json.loads(path.read_text()) == {"step": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_the_name_appears_only_when_the_file_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "state.json"
    with atomic_path(path) as hidden:
        hidden.write_text("all of it")
        assert not path.exists()
    assert path.read_text() == "all of it"
