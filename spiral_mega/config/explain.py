"""What pydantic says of a wrong value, as one sentence that names key, value and remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from spiral_mega.config.harnesses import HARNESSES
from spiral_mega.errors import ConfigError

S = TypeVar("S", bound=BaseModel)


def read_section(model: type[S], values: dict[str, Any], key: str) -> S:
    """`values`, which stand under `key` in the configuration, as a `model`. Raises ConfigError."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ConfigError("; ".join(explain(error, model, key))) from None


def explain(error: ValidationError, model: type[BaseModel], key: str = "") -> Iterator[str]:
    """One sentence for each fault. `key`: where the model stands in the configuration."""
    for item in error.errors():
        name = ".".join(str(part) for part in ([key] if key else []) + list(item["loc"]))
        if item["type"] == "extra_forbidden":
            known = _known_keys(model, item["loc"][:-1])
            close = difflib.get_close_matches(str(item["loc"][-1]), known, n=1)
            names = ", ".join(known) or "none"
            yield f"{name}: unknown key; " + (f"did you mean {close[0]!r}?" if close else f"known keys: {names}")
        elif item["type"] == "missing":
            yield f"{name}: missing; set it in the file or as {name}=..."
        elif item["type"] == "value_error":
            yield str(item["ctx"]["error"])
        else:
            yield f"{name}: {item['msg']} (got {item['input']!r}, {type(item['input']).__name__})"


def _known_keys(model: Any, location: tuple[int | str, ...]) -> list[str]:
    """The keys of the section at `location` in `model`."""
    for part in location:
        if part in HARNESSES:  # a union, told apart by what `kind` says
            model = HARNESSES[str(part)]
            continue
        if isinstance(part, int) or not (isinstance(model, type) and issubclass(model, BaseModel)):
            continue
        annotation = model.model_fields[part].annotation if part in model.model_fields else None
        options = [annotation, *getattr(annotation, "__args__", ())]
        model = next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), model)
    return list(model.model_fields)
