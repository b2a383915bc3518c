"""A recipe is one new file and its configuration: nothing else has to know of it."""

from pathlib import Path

import pytest

from spiral_mega.algorithm import objectives
from spiral_mega.algorithm.objectives import make_objective
from spiral_mega.errors import ConfigError
from spiral_mega.traces import SEARCH
from spiral_mega.validation.load import load_config

RECIPE = """
from dataclasses import dataclass

from spiral_mega.algorithm.sampling_plan import SamplingPlan
from spiral_mega.config.schema import Section


class Options(Section):
    bonus: float
    rounds: int = 1


@dataclass
class Constant:
    plan: SamplingPlan
    bonus: float
    components = ("search",)

    def assign_credit(self, episode):
        for trace in episode.search:
            trace.advantage = self.bonus

    def gradient_scales(self):
        return {"search": self.bonus}


def build(config, options):
    return Constant(SamplingPlan(config.search_traces), options.bonus)
"""


@pytest.fixture
def config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of recipes with one more file in it, and a configuration that names it."""
    (tmp_path / "constant_credit.py").write_text(RECIPE)
    monkeypatch.setattr(objectives, "__path__", [*objectives.__path__, str(tmp_path)])
    path = tmp_path / "constant.yaml"
    path.write_text(
        f"include: {Path('configs/demo.yaml').resolve()}\n"
        "algorithm: {objective: constant_credit, options: {bonus: 2.5}, component_weights: unbiased}\n"
    )
    return path


def test_a_new_file_is_a_recipe_with_options_of_its_own(config_file: Path) -> None:
    objective = make_objective(load_config(config_file).algorithm)
    assert objective.gradient_scales() == {SEARCH: 2.5}
    assert make_objective(
        load_config(config_file, ["algorithm.options.bonus=3.0"]).algorithm
    ).gradient_scales() == {SEARCH: 3.0}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("algorithm.options.bonsu=1.0", ["algorithm.options.bonsu", "did you mean 'bonus'"]),
        ("algorithm.options.bonus=much", ["algorithm.options.bonus", "'much'"]),
        ("algorithm.options.rounds=1.5", ["algorithm.options.rounds", "integer"]),
        ("algorithm.objective=constant", ["'constant'", "constant_credit", "spiral"]),
    ],
)
def test_its_options_are_read_as_strictly_as_the_rest(
    config_file: Path, override: str, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(config_file, [override])
    assert all(word in str(error.value) for word in words), str(error.value)
