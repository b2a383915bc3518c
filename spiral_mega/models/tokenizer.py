"""Tokenizer and stop tokens of a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from spiral_mega.config import ModelConfig
from spiral_mega.errors import ConfigError


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of the model; an error that names the folder when there is none."""
    path = model.tokenizer or model.path
    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:  # files of the wrong form fail in many ways
        raise ConfigError(f"model.tokenizer / model.path {path!r} does not load as a tokenizer: {error}") from error


def stop_ids(model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens that end a response: those of the generation config, else the model's config, and the tokenizer's.

    Raises ConfigError if there are none, if one is no token of the model, or if the generation config is unreadable.
    """
    config = AutoConfig.from_pretrained(model.path)
    declared: Any = config.eos_token_id
    folder = Path(model.path)
    if not folder.is_dir() or (folder / "generation_config.json").exists():
        try:
            declared = GenerationConfig.from_pretrained(model.path).eos_token_id or declared
        except Exception as error:
            if folder.is_dir():
                raise ConfigError(f"{folder / 'generation_config.json'} cannot be read: {error}") from error
    ids = [*(declared if isinstance(declared, list) else [declared]), tokenizer.eos_token_id]
    ids = [token for token in ids if token is not None]
    vocabulary = config.get_text_config().vocab_size
    if not ids:
        raise ConfigError(f"model.path {model.path!r} names no end token (generation_config.json, tokenizer): add one")
    if strange := [token for token in ids if not (isinstance(token, int) and 0 <= token < vocabulary)]:
        raise ConfigError(f"model.path {model.path!r} names end tokens {strange}, but has tokens 0 to {vocabulary - 1}")
    if len(tokenizer) > vocabulary:
        raise ConfigError(
            f"the tokenizer has {len(tokenizer)} tokens and the model at {model.path} only {vocabulary}: "
            "they do not belong together; check model.tokenizer"
        )
    return frozenset(ids)
