"""The models of a run by name: one, without a name, or two (paper, appendix B), `search` and `aggregation`."""

from __future__ import annotations

from collections.abc import Collection

from spiral_mega.config.schema import Config
from spiral_mega.traces import AGGREGATION, SEARCH

DEFAULT_MODEL = ""  # the name of a model that is alone; no metric, file or key shows it


def model_configs(config: Config) -> dict[str, Config]:
    """The configuration by which each model of the run is built and trained, as if it were alone."""
    two = config.two_models
    if two is None:
        return {DEFAULT_MODEL: config}
    model = two.aggregation_model or config.model
    shared = {"tokenizer": config.model.tokenizer or config.model.path}
    theirs = {
        "model": model.model_copy(update=shared),
        "optimizer": two.aggregation_optimizer or config.optimizer,
        "two_models": None,
    }
    return {SEARCH: config.model_copy(update={"two_models": None}), AGGREGATION: config.model_copy(update=theirs)}


def model_for(component: str, models: Collection[str]) -> str:
    """The one of `models` that writes a component: all of them, or search traces, or the answers of every level."""
    if len(models) == 1:
        (alone,) = models
        return alone
    return SEARCH if component == SEARCH else AGGREGATION


def metric_key(name: str, model: str) -> str:
    """A metric or key of one of two models: name/search; of a model alone: name."""
    return f"{name}/{model}" if model else name
