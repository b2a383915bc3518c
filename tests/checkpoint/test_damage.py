"""Whatever is done to a checkpoint's files is found before they are loaded, and the newest whole one is chosen."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from spiral_mega.checkpoint.manager import CheckpointError, CheckpointManager
from spiral_mega.distributed.runtime import Runtime
from tests.support.ranks import run_ranks


def truncated(folder: Path) -> None:
    shard = folder / "__1_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])


def one_bit_flipped(folder: Path) -> None:
    shard = folder / "__0_0.distcp"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)


def shard_missing(folder: Path) -> None:
    (folder / "__1_0.distcp").unlink()


def metadata_changed(folder: Path) -> None:
    path = folder / ".metadata"
    data = bytearray(path.read_bytes())
    data[-1] ^= 255
    path.write_bytes(data)


def meta_changed(folder: Path) -> None:
    path = folder / "meta.json"
    path.write_text(path.read_text().replace('"world_size": 2', '"world_size": 8'))


def manifest_missing(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def manifest_not_json(folder: Path) -> None:
    (folder / "manifest.json").write_text("[")


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (truncated, "__1_0.distcp has"),
    "one bit flipped": (one_bit_flipped, "__0_0.distcp does not hold what was written"),
    "shard missing": (shard_missing, "__1_0.distcp is missing"),
    "metadata changed": (metadata_changed, ".metadata does not hold what was written"),
    "meta changed": (meta_changed, "meta.json does not hold what was written"),
    "manifest missing": (manifest_missing, "manifest.json is missing"),
    "manifest not JSON": (
        manifest_not_json,
        "manifest.json or a file that it names cannot be read",
    ),
}


def damage_and_look(runtime: Runtime, folder: Path) -> dict[str, tuple[int | None, list[str], str]]:
    """By damage: the step found with an older checkpoint at hand, the folders left, and the error without one."""
    whole = CheckpointManager(folder / "whole", keep_last=2)
    for step in (1, 2):
        whole.save(step, {f"part of rank {runtime.rank}": torch.zeros(1000)}, {"world_size": 2})
        whole.wait()
    found = {}
    for name, (damage, _) in DAMAGES.items():
        for case, steps in (("two", (1, 2)), ("one", (2,))):
            if runtime.is_main:
                for step in steps:
                    shutil.copytree(
                        folder / "whole" / f"step_{step:06d}",
                        folder / name / case / f"step_{step:06d}",
                    )
                damage(folder / name / case / "step_000002")
            torch.distributed.barrier()
        chosen = CheckpointManager(folder / name / "two", keep_last=2).latest()
        error = ""
        try:
            CheckpointManager(folder / name / "one", keep_last=2).latest()
        except CheckpointError as refusal:
            error = str(refusal)
        torch.distributed.barrier()
        left = [path.name for path in sorted((folder / name / "two").iterdir())]
        found[name] = (chosen, left, error)
    return found


@pytest.fixture(scope="module")
def looked(
    tmp_path_factory: pytest.TempPathFactory,
) -> list[dict[str, tuple[int | None, list[str], str]]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return run_ranks(2, "tests.checkpoint.test_damage:damage_and_look", folder)


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found_and_the_checkpoint_before_it_chosen(
    looked: list[dict[str, tuple[int | None, list[str], str]]], name: str
) -> None:
    for rank in looked:
        chosen, left, error = rank[name]
        assert chosen == 1
        assert left == ["step_000001", "step_000002.damaged"]
        assert DAMAGES[name][1] in error
        assert "step_000002" in error


def test_a_manifest_names_every_file(tmp_path: Path) -> None:
    run_ranks(2, "tests.checkpoint.test_damage:save_one", tmp_path)
    folder = tmp_path / "step_000001"
    named = json.loads((folder / "manifest.json").read_text())["files"]
    assert sorted(named) == sorted(
        path.name for path in folder.iterdir() if path.name != "manifest.json"
    )
    assert all(entry["bytes"] == (folder / name).stat().st_size for name, entry in named.items())


def save_one(runtime: Runtime, folder: Path) -> None:
    checkpoints = CheckpointManager(folder, keep_last=2)
    checkpoints.save(1, {f"part of rank {runtime.rank}": torch.zeros(1000)}, {"world_size": 2})
    checkpoints.wait()
