"""Which frozen model `algorithm.kl` is measured to."""

from __future__ import annotations

from spiral_mega.config import Config
from spiral_mega.errors import ConfigError
from spiral_mega.models.model_config import read_model_config


def reference_path(config: Config) -> str | None:
    """The model of the reference, or None where it is none of its own: without algorithm.kl, and with adapters, which
    are switched off. Without a path it is the model that training starts from. Raises ConfigError for a model of
    another vocabulary."""
    kl = config.algorithm.kl
    if kl is None or (kl.reference is None and config.model.lora is not None):
        return None
    path = kl.reference or config.model.path
    sizes = [read_model_config(each).get_text_config().vocab_size for each in (path, config.model.path)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"algorithm.kl.reference {path} has {sizes[0]} tokens and model.path {config.model.path} {sizes[1]}: name "
            "a model of the same tokenizer"
        )
    return path
