"""Read a model's config.json."""

from __future__ import annotations

import logging

from transformers import AutoConfig, PretrainedConfig

from spiral_mega.errors import UserError

log = logging.getLogger(__name__)


def read_model_config(path: str) -> PretrainedConfig:
    """Read the config of the model at `path`, a folder or a name on the hub, and set every dropout in it to zero.

    A policy gradient needs the sampler's distribution, so the trained model must not drop anything out. Raises
    UserError if there is no readable config.
    """
    try:
        config = AutoConfig.from_pretrained(path)
    except Exception as error:  # a malformed config fails in many ways
        raise UserError(
            f"model.path {path!r} does not lead to a model: name a folder with a config.json, or a model on the hub "
            f"({error})"
        ) from error
    for name, value in list(vars(config).items()):
        if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float) and value:
            log.info("%s of %s is %s; trained with 0", name, path, value)
            setattr(config, name, 0.0)
    return config
