"""Check a configuration against the config.json and tokenizer of its models, before weights are loaded."""

from __future__ import annotations

from spiral_mega.config import Config, ModelConfig
from spiral_mega.config.model_set import model_configs
from spiral_mega.errors import ConfigError
from spiral_mega.models.model_config import check_dimensions, read_model_config
from spiral_mega.models.tokenizer import load_tokenizer


def check_models(config: Config) -> None:
    """Check that each model exists, has the configured dimensions and supports max_context_tokens.

    Of two models, check also that they have the same tokens, since one reads what the other wrote.
    Raises ConfigError.
    """
    for each in model_configs(config).values():
        _check_model(each.model, config.rollout.sampling.max_context_tokens)
    if config.two_models is not None and config.two_models.aggregation_model is not None:
        _check_same_tokens(config.model, config.two_models.aggregation_model)


def _check_model(model: ModelConfig, max_context_tokens: int) -> None:
    hf_config = read_model_config(model.path)
    check_dimensions(model.dimensions or {}, hf_config, model.path)
    limit = getattr(hf_config, "max_position_embeddings", None)
    if limit is not None and max_context_tokens > limit:
        raise ConfigError(
            f"rollout.sampling.max_context_tokens is {max_context_tokens}, but the model at "
            f"{model.path} supports {limit} positions: lower it"
        )


def _check_same_tokens(theta: ModelConfig, phi: ModelConfig) -> None:
    if _tokens(theta) != _tokens(phi):
        raise ConfigError(
            f"two_models.aggregation_model.path {phi.path} has other tokens than model.path "
            f"{theta.path}, but each reads what the other wrote: use models of the same tokenizer "
            "and vocabulary"
        )


def _tokens(model: ModelConfig) -> tuple[int, dict[str, int]]:
    """Return the size of the model's vocabulary, and its tokens by name."""
    vocabulary: int = read_model_config(model.path).get_text_config().vocab_size
    return vocabulary, load_tokenizer(model).get_vocab()
