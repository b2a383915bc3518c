"""Load a model's tokenizer, and find the tokens that end a response."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from spiral_mega.config import ModelConfig
from spiral_mega.errors import ConfigError


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer. Raises ConfigError, naming the folder, if it does not load."""
    path = model.tokenizer or model.path
    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:  # malformed files fail in many ways
        raise ConfigError(
            f"model.tokenizer / model.path {path!r} does not load as a tokenizer: {error}"
        ) from error


def stop_ids(model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of the tokens that end a response.

    These are the tokenizer's end token and those of the generation config, or of the model's config
    where the generation config names none. Raises ConfigError if there are none, if one is no token
    of the model, if the tokenizer has more tokens than the model, or if the generation config is
    unreadable.
    """
    config = AutoConfig.from_pretrained(model.path)
    declared = _declared_stop_ids(model.path, config)
    ids = [token for token in (*declared, tokenizer.eos_token_id) if token is not None]
    vocabulary = config.get_text_config().vocab_size
    if not ids:
        raise ConfigError(
            f"model.path {model.path!r} names no end token (generation_config.json, tokenizer): add one"
        )
    invalid = [token for token in ids if not (isinstance(token, int) and 0 <= token < vocabulary)]
    if invalid:
        raise ConfigError(
            f"model.path {model.path!r} names end tokens {invalid}, but has tokens 0 to {vocabulary - 1}"
        )
    if len(tokenizer) > vocabulary:
        raise ConfigError(
            f"the tokenizer has {len(tokenizer)} tokens and the model at {model.path} only "
            f"{vocabulary}: they do not belong together; check model.tokenizer"
        )
    return frozenset(ids)


def _declared_stop_ids(path: str, config: Any) -> list[Any]:
    """Read eos_token_id from the generation config, or else from the model's `config`.

    Entries may be None.
    """
    declared = config.eos_token_id
    folder = Path(path)
    is_local = folder.is_dir()
    if not is_local or (folder / "generation_config.json").exists():
        try:
            declared = GenerationConfig.from_pretrained(path).eos_token_id or declared
        except Exception as error:
            if is_local:
                raise ConfigError(
                    f"{folder / 'generation_config.json'} cannot be read: {error}"
                ) from error
    return declared if isinstance(declared, list) else [declared]
