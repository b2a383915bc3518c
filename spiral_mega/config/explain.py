"""Turn pydantic's validation errors into one sentence each, naming key, value and remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from spiral_mega.errors import ConfigError

S = TypeVar("S", bound=BaseModel)
Location = tuple[int | str, ...]


def read_section(model: type[S], values: dict[str, Any], key: str) -> S:
    """Validate `values`, the section under `key` in the configuration, as a `model`. Raises ConfigError."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ConfigError("; ".join(explain(error, model, key))) from None


def explain(error: ValidationError, model: type[BaseModel], key: str = "") -> Iterator[str]:
    """Yield one sentence for each error of validating `model`, the section under `key` (empty: the whole config)."""
    for item in error.errors():
        yield _sentence(item, model, key)


def _sentence(item: ErrorDetails, model: type[BaseModel], key: str) -> str:
    location = item["loc"]
    name = ".".join(map(str, (key, *location) if key else location))
    if item["type"] == "extra_forbidden":
        return f"{name}: unknown key; {_suggestion(model, location)}"
    if item["type"] == "missing":
        return f"{name}: missing; set it in the file or as {name}=..."
    if item["type"] == "value_error":  # raised by a validator of ours, whose text names the key
        return str(item["ctx"]["error"])
    return f"{name}: {item['msg']} (got {item['input']!r}, {type(item['input']).__name__})"


def _suggestion(model: type[BaseModel], location: Location) -> str:
    """Name the key that an unknown key resembles, in its section or one level deeper, else all keys of the section."""
    section = _section_at(model, location[:-1])
    known: dict[str, str] = {}
    for name, field in section.model_fields.items():
        if get_origin(field.annotation) is not list:
            for inner in _sections_in(field.annotation):
                known |= {key: f"{name}.{key}" for key in inner.model_fields}
    known |= {name: name for name in section.model_fields}
    close = difflib.get_close_matches(str(location[-1]), known, n=1)
    if close:
        return f"did you mean {known[close[0]]!r}?"
    return f"known keys: {', '.join(section.model_fields) or 'none'}"


def _section_at(model: type[BaseModel], location: Location) -> type[BaseModel]:
    """Return the section at `location`, whose parts are keys, list indices and tags of discriminated unions."""
    candidates = [model]
    for part in location:
        tagged = [each for each in candidates if len(candidates) > 1 and part in _tags(each)]
        field = candidates[0].model_fields.get(str(part))
        if tagged:
            candidates = tagged
        elif field is not None:
            candidates = _sections_in(field.annotation) or candidates
    return candidates[0]


def _sections_in(annotation: Any) -> list[type[BaseModel]]:
    """Return every section that a type annotation contains, in order."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    found = []
    for argument in get_args(annotation):
        found += _sections_in(argument)
    return found


def _tags(section: type[BaseModel]) -> list[Any]:
    """Return the values by which a discriminated union can tell this section: its Literal fields of one value."""
    literals = [field.annotation for field in section.model_fields.values() if get_origin(field.annotation) is Literal]
    return [get_args(literal)[0] for literal in literals if len(get_args(literal)) == 1]
