"""Load a configuration: YAML files with includes, then dotted overrides, then schema and contradictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from spiral_mega.config.schema import Config
from spiral_mega.config.section import explain
from spiral_mega.errors import ConfigError
from spiral_mega.evaluation.harnesses.registry import read_harnesses
from spiral_mega.validation.contradictions import find_contradictions


def load_config(
    path: str | Path | None, overrides: Sequence[str] = (), values: Mapping[str, Any] | None = None
) -> Config:
    """Load the YAML file `path`, apply dotted `overrides` such as "run.steps=5" or
    "data.train.0.limit=5", validate.

    `values` take precedence over the file and the overrides over both; without a file (None) there
    are only `values` and overrides. A file's `include:` (a name or a list, relative to the file) is
    merged below the file's own keys; later ones win; lists are replaced, not joined. Raises
    ConfigError.
    """
    base = _read_yaml(Path(path), ()) if path is not None else OmegaConf.create()
    source = str(path or "the command line")
    merged = OmegaConf.merge(base, dict(values or {}))
    assert isinstance(merged, DictConfig)
    resolved = _apply(overrides, merged, source)
    try:
        config = Config.model_validate(resolved)
    except ValidationError as error:
        raise _config_error(source, list(explain(error, Config))) from None
    problems = list(find_contradictions(config))
    try:
        config = _resolve_harnesses(config)
    except ConfigError as error:
        problems.append(str(error))
    if problems:
        raise _config_error(source, problems)
    return config


def dump_config(config: Config) -> str:
    """Return the resolved configuration as YAML, which `load_config` reads back to an equal Config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _apply(overrides: Sequence[str], config: DictConfig, source: str) -> Any:
    """Set the overrides in `config` and return it as plain values, with interpolations resolved."""
    for override in overrides:
        if "=" not in override:
            raise ConfigError(f"override {override!r} has no '=': write section.key=value")
    try:
        for override in overrides:
            key, _, value = override.partition("=")
            OmegaConf.update(
                config, key, OmegaConf.from_dotlist([f"value={value}"])["value"], merge=True
            )
        return OmegaConf.to_container(config, resolve=True)
    except (
        OmegaConfBaseException,
        yaml.YAMLError,
        TypeError,
        ValueError,
        IndexError,
        AssertionError,
    ) as error:
        raise ConfigError(f"{source} with overrides {list(overrides)}: {error}") from error


def _config_error(source: str, problems: Sequence[str]) -> ConfigError:
    return ConfigError("\n".join([f"{source}:", *(f"  {problem}" for problem in problems)]))


def _resolve_harnesses(config: Config) -> Config:
    """Fill in the defaults of every entry of `eval.harnesses`. Raises ConfigError for a wrong entry."""
    harnesses = [
        harness.model_dump(mode="json") for harness in read_harnesses(config.eval.harnesses)
    ]
    evaluation = config.eval.model_copy(update={"harnesses": harnesses})
    return config.model_copy(update={"eval": evaluation})


def _read_yaml(path: Path, parents: tuple[Path, ...]) -> DictConfig:
    """Read a file and merge it over the files that it includes; `parents` are the files that include it."""
    path = path.resolve()
    if path in parents:
        raise ConfigError(f"{path} includes itself, through {' -> '.join(map(str, parents))}")
    try:
        values = OmegaConf.to_container(OmegaConf.create(path.read_text(encoding="utf-8")))
    except OSError as error:
        included = f" (included by {parents[-1]})" if parents else ""
        raise ConfigError(f"cannot read config file {path}{included}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, OmegaConfBaseException, AssertionError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path} must hold sections (run:, model:, ...), not {type(values).__name__}"
        )
    includes = _includes(values.pop("include", []), path)
    bases = [_read_yaml(path.parent / name, (*parents, path)) for name in includes]
    try:
        merged = OmegaConf.merge(*bases, OmegaConf.create(values))
    except (OmegaConfBaseException, TypeError) as error:
        raise ConfigError(f"{path} does not fit the files that it includes: {error}") from error
    assert isinstance(merged, DictConfig)
    return merged


def _includes(value: Any, path: Path) -> list[str]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"{path}: include must be a file name or a list of file names, not {names!r}"
        )
    return names
