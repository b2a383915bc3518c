import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from spiral_mega.report.curves import PANELS, plot_curves, smooth
from spiral_mega.telemetry.metrics_file import MetricsFile, read_metrics

ALL = (
    *(f"{kind}/search" for kind in ("reward", "length", "entropy", "truncated", "gated")),
    *(f"{kind}/aggregation" for kind in ("reward", "length", "entropy", "truncated", "gated")),
    "batch/effective_share", "sampler/log_ratio_mean", "sampler/log_ratio_abs_max", "optim/grad_norm",
    "throughput/tokens_per_s", "time/rollout", "time/update", "time/step", "eval/search_accuracy", "eval/pass@8",
)  # fmt: skip


def record(run_dir: Path, steps: int, names: tuple[str, ...], value: float = 0.5) -> None:
    file = MetricsFile(run_dir / "metrics.jsonl")
    for step in range(1, steps + 1):
        file.append(step, dict.fromkeys(names, value))
    file.close()


def pixels(path: Path) -> np.ndarray:
    image: np.ndarray = imread(path)
    assert image.std() > 0.01, "the picture is blank"
    return image


@pytest.mark.parametrize("steps", [1, 100])
def test_every_metric_of_the_loop_has_its_panel(tmp_path: Path, steps: int) -> None:
    record(tmp_path, steps, ALL)
    history = read_metrics(tmp_path)
    assert {name for panel in PANELS for name in panel.names(history)} == set(ALL)
    assert plot_curves(tmp_path) == tmp_path / "curves.png"
    pixels(tmp_path / "curves.png")


def test_panels_without_metrics_take_no_room(tmp_path: Path) -> None:
    record(tmp_path, 5, ("reward/search",))
    small = pixels(plot_curves(tmp_path)).shape
    record(tmp_path, 5, ("reward/search", "optim/grad_norm", "truncated/search", "entropy/search"))
    large = pixels(plot_curves(tmp_path)).shape
    assert small[0] < large[0]
    assert small[1] < large[1]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [math.nan, 0.0])
def test_values_that_cannot_be_drawn_are_gaps(tmp_path: Path, value: float) -> None:
    record(tmp_path, 5, ALL, value)
    pixels(plot_curves(tmp_path))


def test_evaluations_that_are_not_shares_stay_out_of_the_panel_of_shares(tmp_path: Path) -> None:
    record(tmp_path, 2, ("eval/pass@8", "eval/length"))
    history = read_metrics(tmp_path)
    assert [name for panel in PANELS for name in panel.names(history)] == ["eval/pass@8"]


def test_the_time_of_an_evaluation_is_not_part_of_a_step(tmp_path: Path) -> None:
    record(tmp_path, 2, ("time/eval",))
    assert not any(panel.names(read_metrics(tmp_path)) for panel in PANELS)


def test_a_run_with_nothing_to_draw_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        plot_curves(tmp_path)
    record(tmp_path, 2, ("something/else",))
    with pytest.raises(ValueError, match="no metric that is drawn"):
        plot_curves(tmp_path)


def test_smoothing_keeps_a_constant_and_skips_gaps() -> None:
    assert smooth([2.0] * 50) == [2.0] * 50
    assert smooth([2.0] * 20 + [math.nan] + [2.0] * 20) == [2.0] * 41
