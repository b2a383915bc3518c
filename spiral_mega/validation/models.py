"""Check a configuration against the config and tokenizer of its models, before weights load."""

from __future__ import annotations

from spiral_mega.config import Config, ModelConfig
from spiral_mega.config.model_set import model_configs
from spiral_mega.errors import ConfigError
from spiral_mega.models.dimensions import check_dimensions
from spiral_mega.models.model_config import read_model_config
from spiral_mega.models.tokenizer import load_tokenizer


def check_context(config: Config) -> None:
    """That each model exists, is the one that was planned with, and is made for rollout.sampling.max_context_tokens.

    Of two, also that they have the same tokens, since the one reads what the other wrote.
    """
    for each in model_configs(config).values():
        model = read_model_config(each.model.path)
        check_dimensions(each.model.dimensions or {}, model, each.model.path)
        limit = getattr(model, "max_position_embeddings", None)
        if limit is not None and config.rollout.sampling.max_context_tokens > limit:
            raise ConfigError(
                f"rollout.sampling.max_context_tokens is {config.rollout.sampling.max_context_tokens}, but the model at "
                f"{each.model.path} is made for {limit} positions: lower it"
            )
    if config.two_models is not None and (phi := config.two_models.aggregation_model) is not None:
        theirs = [_tokens(model) for model in (config.model, phi)]
        if theirs[0] != theirs[1]:
            raise ConfigError(
                f"two_models.aggregation_model.path {phi.path} has other tokens than model.path {config.model.path}: "
                "the one reads what the other wrote, so name models of the same tokenizer and vocabulary"
            )


def _tokens(model: ModelConfig) -> tuple[int, dict[str, int]]:
    """The size of the model's vocabulary, and its tokens by name."""
    vocabulary: int = read_model_config(model.path).get_text_config().vocab_size
    return vocabulary, load_tokenizer(model).get_vocab()
