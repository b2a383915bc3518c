"""The models of a run by name: one without a name, or two named `search` and `aggregation` (paper, appendix B)."""

from __future__ import annotations

from collections.abc import Collection

from spiral_mega.config.schema import Config
from spiral_mega.traces import AGGREGATION, SEARCH

DEFAULT_MODEL = ""  # the name of the only model; not shown in metrics, files and keys


def model_configs(config: Config) -> dict[str, Config]:
    """Return the configuration of each model by name, as if that model were the only one."""
    two_models = config.two_models
    if two_models is None:
        return {DEFAULT_MODEL: config}
    aggregation_model = two_models.aggregation_model or config.model
    shared_tokenizer = {"tokenizer": config.model.tokenizer or config.model.path}
    aggregation_sections = {
        "model": aggregation_model.model_copy(update=shared_tokenizer),
        "optimizer": two_models.aggregation_optimizer or config.optimizer,
        "two_models": None,
    }
    return {
        SEARCH: config.model_copy(update={"two_models": None}),
        AGGREGATION: config.model_copy(update=aggregation_sections),
    }


def model_for(component: str, models: Collection[str]) -> str:
    """Return which of `models` writes the traces of `component`: one the search traces, the other all later levels."""
    if len(models) == 1:
        (only,) = models
        return only
    return SEARCH if component == SEARCH else AGGREGATION


def metric_key(name: str, model: str) -> str:
    """Return the name of a model's metric or key: name/search of two models, name of the only one."""
    return f"{name}/{model}" if model else name
