"""Which frozen model is the reference of `algorithm.kl`, the KL of the policy to a reference.

The KL itself is computed in algorithm/regularizers.py, from the log-probs of this model:
fsdp/reference_model.py, or the stages of megatron/megatron_policy.py.
"""

from __future__ import annotations

from spiral_mega.config import Config
from spiral_mega.errors import ConfigError
from spiral_mega.models.model_config import read_model_config


def reference_path(config: Config) -> str | None:
    """Return the path of the reference model; None without algorithm.kl, and where no second model
    is needed.

    Without a path in the configuration the reference is the model that training starts from. With
    adapters that is the policy itself with its adapters disabled, so no second model is needed.
    Raises ConfigError for a model of another vocabulary.
    """
    kl = config.algorithm.kl
    if kl is None or (kl.reference is None and config.model.lora is not None):
        return None
    path = kl.reference or config.model.path
    reference_size, model_size = _vocabulary_size(path), _vocabulary_size(config.model.path)
    if reference_size != model_size:
        raise ConfigError(
            f"algorithm.kl.reference {path} has {reference_size} tokens and model.path "
            f"{config.model.path} {model_size}: name a model of the same tokenizer"
        )
    return path


def _vocabulary_size(path: str) -> int:
    return read_model_config(path).get_text_config().vocab_size
