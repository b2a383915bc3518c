"""Read a configuration: YAML files that include others, then dotted overrides, then the schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from spiral_mega.config.explain import explain
from spiral_mega.config.schema import Config
from spiral_mega.errors import ConfigError
from spiral_mega.validation.contradictions import find_contradictions


def load_config(
    path: str | Path | None, overrides: Sequence[str] = (), values: Mapping[str, Any] | None = None
) -> Config:
    """The configuration in the YAML file `path`, changed by dotted `overrides` such as "rollout.sampling.temperature=0.8" or
    "data.train.0.limit=5".

    `values` go on top of the file and below the overrides; without a file (None) they are all there is. A file's
    `include:` (a name or a list, relative to the file) is merged below the file's own keys; later ones win; lists are
    replaced, not joined. Raises ConfigError.
    """
    base = _read(Path(path), ()) if path is not None else OmegaConf.create()
    path = path or "the command line"
    merged = OmegaConf.merge(base, dict(values or {}))
    assert isinstance(merged, DictConfig)
    base = merged
    for override in overrides:
        if "=" not in override:
            raise ConfigError(f"override {override!r} has no '=': write section.key=value")
    try:
        for override in overrides:
            key, _, value = override.partition("=")
            OmegaConf.update(base, key, OmegaConf.from_dotlist([f"value={value}"])["value"], merge=True)
        resolved = OmegaConf.to_container(base, resolve=True)
    except (OmegaConfBaseException, yaml.YAMLError, TypeError, ValueError, IndexError, AssertionError) as error:
        raise ConfigError(f"{path} with overrides {list(overrides)}: {error}") from error
    try:
        config = Config.model_validate(resolved)
    except ValidationError as error:
        raise ConfigError(f"{path}:\n" + "\n".join(f"  {text}" for text in explain(error, Config))) from None
    if contradictions := list(find_contradictions(config)):
        raise ConfigError(f"{path}:\n" + "\n".join(f"  {text}" for text in contradictions))
    return config


def dump_config(config: Config) -> str:
    """The resolved configuration as YAML, which `load_config` reads back to an equal Config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _read(path: Path, parents: tuple[Path, ...]) -> DictConfig:
    path = path.resolve()
    if path in parents:
        raise ConfigError(f"{path} includes itself, by way of {' -> '.join(map(str, parents))}")
    try:
        values = OmegaConf.to_container(OmegaConf.create(path.read_text(encoding="utf-8")))
    except OSError as error:
        included = f" (included by {parents[-1]})" if parents else ""
        raise ConfigError(f"cannot read config file {path}{included}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, OmegaConfBaseException, AssertionError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold sections (run:, model:, ...), not {type(values).__name__}")
    includes = values.pop("include", [])
    if isinstance(includes, str):
        includes = [includes]
    if not isinstance(includes, list) or not all(isinstance(name, str) for name in includes):
        raise ConfigError(f"{path}: include must be a file name or a list of them, not {includes!r}")
    bases = [_read(path.parent / name, (*parents, path)) for name in includes]
    try:
        merged = OmegaConf.merge(*bases, OmegaConf.create(values))
    except (OmegaConfBaseException, TypeError) as error:
        raise ConfigError(f"{path} does not fit what it includes: {error}") from error
    assert isinstance(merged, DictConfig)
    return merged
