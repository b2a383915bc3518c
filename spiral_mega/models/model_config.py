"""Read a model's config.json, or the dimensions that a configuration gives in its place."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from spiral_mega.config import ModelConfig
from spiral_mega.errors import UserError

log = logging.getLogger(__name__)


def read_model_config(path: str) -> PretrainedConfig:
    """Read the config of the model at `path`, a folder or a name on the hub, and set every dropout
    in it to zero.

    A policy gradient needs the sampler's distribution, so the trained model must not drop anything
    out. Raises UserError if there is no readable config.
    """
    try:
        config = AutoConfig.from_pretrained(path)
    except Exception as error:  # a malformed config fails in many ways
        raise UserError(
            f"model.path {path!r} does not lead to a model: name a folder with a config.json, or a "
            f"model on the hub ({error})"
        ) from error
    for name, value in list(vars(config).items()):
        if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float) and value:
            log.info("%s of %s is %s; trained with 0", name, path, value)
            setattr(config, name, 0.0)
    return config


def resolve_model_config(model: ModelConfig) -> PretrainedConfig:
    """Return the config that model.dimensions describe, or else that of model.path.

    Raises UserError. With dimensions, a run is planned without the model's files or the hub.
    """
    if model.dimensions is None:
        return read_model_config(model.path)
    try:
        return AutoConfig.for_model(**model.dimensions)
    except (TypeError, ValueError, KeyError) as error:
        raise UserError(
            f"model.dimensions do not describe a model ({error}): take them from its config.json"
        ) from error


def check_dimensions(dimensions: Mapping[str, Any], config: PretrainedConfig, path: str) -> None:
    """Raise UserError if the model at `path`, of that config, is not the one that model.dimensions describe."""
    own = config.to_dict()
    wrong = []
    for key, value in dimensions.items():
        if key in own and own[key] != value:
            wrong.append(f"{key} is {value!r} in model.dimensions and {own[key]!r} in the model")
    if wrong:
        raise UserError(
            f"model.path {path!r} is another model than planned with: {'; '.join(wrong)}"
        )
