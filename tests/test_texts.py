"""Every key of the configuration is described, and every option of the command has a help text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import pytest
import typer
from pydantic import BaseModel

from spiral_mega.cli import app
from spiral_mega.config import Config


def sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from sections_in(argument)


def undescribed(section: type[BaseModel], key: str = "") -> Iterator[str]:
    """Yield the keys in `section` with neither a description nor, for a section, a docstring."""
    for name, field in section.model_fields.items():
        if len(get_args(field.annotation)) == 1 and field.default == get_args(field.annotation)[0]:
            continue  # the tag of a member of a union
        inner = list(sections_in(field.annotation))
        if not field.description and not (inner and all(each.__doc__ for each in inner)):
            yield key + name
        for each in inner:
            yield from undescribed(each, f"{key}{name}.")


def test_every_key_is_described() -> None:
    assert list(undescribed(Config)) == []


COMMANDS = sorted(typer.main.get_command(app).commands.items())  # type: ignore[attr-defined]


@pytest.mark.parametrize(("name", "command"), COMMANDS, ids=[name for name, _ in COMMANDS])
def test_every_option_has_a_help_text(name: str, command: Any) -> None:
    assert command.help
    assert [parameter.name for parameter in command.params if not parameter.help] == []
