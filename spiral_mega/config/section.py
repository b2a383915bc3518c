"""The base class of every section of the configuration, and its errors as sentences.

Each sentence names key, value and remedy.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from spiral_mega.errors import ConfigError

S = TypeVar("S", bound=BaseModel)
Location = tuple[int | str, ...]


class Section(BaseModel):
    """A section of the configuration: strict types, no unknown keys, immutable once read."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


def read_section(model: type[S], values: dict[str, Any], key: str) -> S:
    """Validate `values`, the section under `key`, as a `model`. Raises ConfigError."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ConfigError("; ".join(explain(error, model, key))) from None


def explain(error: ValidationError, model: type[BaseModel], key: str = "") -> Iterator[str]:
    """Yield one sentence for each error in the section under `key` (empty: the whole config)."""
    for item in error.errors():
        yield _sentence(item, model, key)


def _sentence(item: ErrorDetails, model: type[BaseModel], key: str) -> str:
    location, section = _resolve(model, item["loc"])
    name = ".".join(map(str, (key, *location) if key else location))
    if item["type"] == "extra_forbidden":
        return f"{name}: unknown key; {_suggestion(section, str(location[-1]))}"
    if item["type"] == "union_tag_invalid":
        tag, expected = item["ctx"]["tag"], item["ctx"]["expected_tags"]
        return f"{name}.{_discriminator(item)} is {tag!r}: use one of {expected}"
    if item["type"] == "union_tag_not_found":
        name = f"{name}.{_discriminator(item)}"
    if item["type"] in ("missing", "union_tag_not_found"):
        return f"{name}: missing; set it in the file or as {name}=..."
    if item["type"] == "value_error":  # raised by a validator of ours, whose text names the key
        return str(item["ctx"]["error"])
    return f"{name}: {item['msg']} (got {item['input']!r}, {type(item['input']).__name__})"


def _discriminator(item: ErrorDetails) -> str:
    """Return the key that selects a section of a discriminated union."""
    return str(item["ctx"]["discriminator"]).strip("'")


def _suggestion(section: type[BaseModel], unknown: str) -> str:
    """Name the key that `unknown` resembles, in its section or one level deeper, else all keys."""
    known: dict[str, str] = {}
    for name, field in section.model_fields.items():
        if get_origin(field.annotation) is not list:
            for inner in _sections_in(field.annotation):
                known |= {key: f"{name}.{key}" for key in inner.model_fields}
    known |= {name: name for name in section.model_fields}
    close = difflib.get_close_matches(unknown, known, n=1)
    if close:
        return f"did you mean {known[close[0]]!r}?"
    return f"known keys: {', '.join(section.model_fields) or 'none'}"


def _resolve(model: type[BaseModel], location: Location) -> tuple[Location, type[BaseModel]]:
    """Return `location` without tags of discriminated unions, and the section of its last key."""
    keys: list[int | str] = []
    section, candidates = model, [model]
    for part in location:
        tagged = [each for each in candidates if len(candidates) > 1 and part in _tags(each)]
        if tagged:
            candidates = tagged
            continue
        keys.append(part)
        section = candidates[0]
        field = section.model_fields.get(str(part))
        if field is not None:
            candidates = _sections_in(field.annotation) or candidates
    return tuple(keys), section


def _sections_in(annotation: Any) -> list[type[BaseModel]]:
    """Return every section that a type annotation contains, in order."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    found = []
    for argument in get_args(annotation):
        found += _sections_in(argument)
    return found


def _tags(section: type[BaseModel]) -> list[Any]:
    """Return the possible tags of a section in a discriminated union: its Literals of one value."""
    tags = []
    for field in section.model_fields.values():
        values = get_args(field.annotation)
        if get_origin(field.annotation) is Literal and len(values) == 1:
            tags.append(values[0])
    return tags
