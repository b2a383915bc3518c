"""docs/reference/metrics.md and the metrics of runs: every name that a run logs has a row, and every row without a
condition is logged."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from spiral_mega.telemetry import read_metrics
from tests.e2e.runs import train_here

PAGE = Path("docs/reference/metrics.md")
PLACEHOLDERS = {"<component>": r"(search|aggregation(_\d+)?)", "<N1>": r"\d+"}
OF_A_MODEL = (
    "train/",
    "sampler/",
    "optim/",
    "packing/",
    "sync/",
    "entropy/trained",
    "kl/reference",
)


class Row(NamedTuple):
    """One metric of the page; `when` is empty for one that every step logs."""

    name: str
    when: str

    def matches(self, metric: str) -> bool:
        pattern = re.escape(self.name)
        for placeholder, alternatives in PLACEHOLDERS.items():
            pattern = pattern.replace(placeholder, alternatives)
        if self.name.startswith(OF_A_MODEL):
            pattern += "(/search|/aggregation)?"
        return re.fullmatch(pattern, metric) is not None


def read_rows() -> list[Row]:
    rows = []
    for line in PAGE.read_text().splitlines():
        if line.startswith("| `"):
            names, _unit, _meaning, when = (cell.strip() for cell in line.strip("|").split("|"))
            rows += [Row(name, when) for name in re.findall("`([^`]+)`", names)]
    return rows


def logged(folder: Path) -> list[set[str]]:
    """Return the names of each record, without step and time."""
    return [set(record) - {"step", "time"} for record in read_metrics(folder)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with evaluation, checkpoints and a KL penalty."""
    folder = tmp_path_factory.mktemp("metrics") / "run"
    train_here(
        folder,
        *("run.steps=2", "checkpoint.every=1", "algorithm.kl.coefficient=0.01"),
        "data.eval=[{path: configs/demo/heldout.jsonl, verifier: arithmetic, limit: 2}]",
    )
    return folder


@pytest.fixture(scope="module")
def run_of_two_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two") / "run"
    train_here(folder, "run.steps=1", config="configs/recipes/adapters.yaml")
    return folder


def test_no_metric_has_two_rows() -> None:
    names = [row.name for row in read_rows()]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("fixture", ["run", "run_of_two_models"])
def test_every_logged_metric_has_a_row(fixture: str, request: pytest.FixtureRequest) -> None:
    names = set().union(*logged(request.getfixturevalue(fixture)))
    rows = read_rows()
    assert {name for name in names if not any(row.matches(name) for row in rows)} == set()


def test_every_unconditional_row_is_logged_in_every_step(run: Path) -> None:
    steps = logged(run)[1:]  # the first record is the evaluation before training
    assert len(steps) == 2
    for names in steps:
        missing = [
            row.name for row in read_rows() if not row.when and not any(map(row.matches, names))
        ]
        assert missing == []


def test_conditional_rows_are_logged_where_their_condition_holds(run: Path) -> None:
    conditions = {
        "an update",
        "an engine",
        "an evaluation",
        "a checkpoint",
        "`algorithm.kl`",
        "recipe has one",
    }
    names = set().union(*logged(run))
    wanted = [row for row in read_rows() if row.when in conditions]
    assert {row.when for row in wanted} == conditions
    assert [row.name for row in wanted if not any(map(row.matches, names))] == []
