"""Write docs/reference/configuration.md and docs/reference/commands.md from the code.

python -m tools.write_reference            write both pages
python -m tools.write_reference --check    exit with status 1 if a page is not what would be written
"""

from __future__ import annotations

import ast
import importlib
import json
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from spiral_mega.algorithm import objectives
from spiral_mega.cli import app
from spiral_mega.config.schema import Config
from spiral_mega.evaluation.harnesses.registry import HARNESSES

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "reference"
NOTE = "<!-- Written by `make reference` (tools/write_reference.py): change the code and run it again. -->"

CONFIGURATION = f"""{NOTE}

# Configuration

A configuration is YAML with the sections below. `include: other.yaml`, or a list of files, merges other files below
the file's own keys, relative to its folder; lists are replaced, not joined. `section.key=value` on the command line
wins over files, and reaches into lists by position (`data.train.0.limit=5`). Unknown keys, wrong types and
contradictions are refused. `spiral-mega config FILE` prints the resolved configuration.

A section that is not required may be left out: its keys then have their defaults."""

COMMANDS = f"""{NOTE}

# Commands

`spiral-mega COMMAND` is the same as `python -m spiral_mega COMMAND`. Commands that use a model run on several ranks
with `torchrun --nproc-per-node N -m spiral_mega COMMAND`. Errors that the user can fix are printed as one message,
with status 2."""

# Unit of the keys that end in these words.
UNITS = {
    "tokens": "tokens",
    "target_length": "tokens",
    "budgets": "tokens",
    "minutes": "minutes",
    "time_limit_s": "seconds",
    "_mb": "MiB",
    "warmup_steps": "updates",
    "exchange_steps": "engine steps",
    "every": "steps",
}
NAMES = {
    int: "integer",
    float: "number",
    str: "text",
    bool: "true or false",
    Any: "any value",
    NoneType: "null",
}
BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}

# Programs that are not commands of spiral-mega.
PROGRAMS = (
    *("spiral_mega/launch/health.py", "spiral_mega/reproduction/__main__.py"),
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "benchmarks").rglob("*.py")),
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tools").glob("*.py")),
)


def main() -> None:
    """Write the pages, or compare them with `--check`."""
    pages = {"configuration.md": configuration_page(), "commands.md": commands_page()}
    stale = [name for name, text in pages.items() if read(FOLDER / name) != text]
    if "--check" in sys.argv[1:]:
        if stale:
            sys.exit(
                f"error: docs/reference/{', '.join(stale)} is not what the code says: run make reference"
            )
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in stale:
        (FOLDER / name).write_text(pages[name])
        print(f"docs/reference/{name}")


def read(path: Path) -> str:
    """Return the text of a page; empty if there is none yet."""
    return path.read_text() if path.exists() else ""


# --- configuration


def configuration_page() -> str:
    """Return the page of all keys: the schema's, the recipes' options and the harnesses' sizes."""
    writer = SectionWriter()
    parts = [CONFIGURATION]
    for name, field in Config.model_fields.items():
        parts += writer.write(name, field)
        if name == "algorithm":
            parts += _options(writer)
        if name == "eval":
            parts += _harnesses(writer)
    return "\n\n".join(parts) + "\n"


class SectionWriter:
    """Writes a table for each section of the configuration, once; other keys of the same section link to it."""

    def __init__(self) -> None:
        self._keys: dict[type[BaseModel], str] = {}  # the key under which a section is written
        for name, field in Config.model_fields.items():
            self._own(name, field)

    def write(self, key: str, field: FieldInfo) -> list[str]:
        """Return the parts of the page for the sections under `key`, and for those inside them."""
        parts = [f"{'#' * min(2 + key.count('.'), 4)} {key}"]
        sections = sections_in(field.annotation)
        for section in sections:
            text = docstring(section)
            parts.append(f"**{tag_of(section)}**: {text}" if len(sections) > 1 else text)
            parts += self.table(section, key)
        return parts

    def table(self, section: type[BaseModel], key: str) -> list[str]:
        """Return the table of `section`, and the parts for the sections inside it."""
        rows, nested = [], []
        for name, field in section.model_fields.items():
            if is_tag(field):
                continue
            child = f"{key}.{name}"
            if self._own(child, field):
                nested.append((child, field))
            inner = sections_in(field.annotation)
            meaning = field.description or (docstring(inner[0]) if inner else "")
            rows.append((f"`{name}`", self._type(name, field), default_of(field), meaning))
        parts = [table(("key", "type", "default", "meaning"), rows)] if rows else []
        for child, field in nested:
            parts += self.write(child, field)
        return parts

    def _own(self, key: str, field: FieldInfo) -> bool:
        """Return whether the sections of `field` are to be written under `key`: where they come first."""
        sections = sections_in(field.annotation)
        for section in sections:
            self._keys.setdefault(section, key)
        return bool(sections) and self._keys[sections[0]] == key

    def _type(self, name: str, field: FieldInfo) -> str:
        inner = sections_in(field.annotation)
        if not inner:
            return with_unit(name, type_words(field.annotation, field.metadata))
        words = f"[section](#{anchor(self._keys[inner[0]])})"
        if get_origin(field.annotation) is list:
            words = f"list of {words}"
        return f"{words}, or null" if NoneType in get_args(field.annotation) else words


def _options(writer: SectionWriter) -> list[str]:
    """Return the options of every recipe that has any."""
    parts = [
        "### algorithm.options",
        "Options of the recipe that `algorithm.objective` names. Recipes that are not listed have none.",
    ]
    for module in sorted(each.name for each in pkgutil.iter_modules(objectives.__path__)):
        recipe = importlib.import_module(f"{objectives.__name__}.{module}")
        if hasattr(recipe, "Options"):
            parts += [f"#### algorithm.options.{module}", docstring(recipe.Options)]
            parts += writer.table(recipe.Options, f"algorithm.options.{module}")
    return parts


def _harnesses(writer: SectionWriter) -> list[str]:
    """Return the sizes of every harness."""
    parts = ["### eval.harnesses", "Each entry has a `kind` and that harness's own keys."]
    for kind, harness in HARNESSES.items():
        parts += [f"#### eval.harnesses.{kind}", docstring(harness)]
        parts += writer.table(harness, f"eval.harnesses.{kind}")
    return parts


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the sections that a type contains."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    found = []
    for argument in get_args(annotation):
        found += sections_in(argument)
    return found


def is_tag(field: FieldInfo) -> bool:
    """Return whether a key has one allowed value, which tells the sections of a union apart."""
    return get_origin(field.annotation) is Literal and get_args(field.annotation) == (
        field.default,
    )


def tag_of(section: type[BaseModel]) -> str:
    """Return `name: value` of a section that belongs to a union."""
    for name, field in section.model_fields.items():
        if is_tag(field):
            return f"{name} = {field.default}"
    return section.__name__


def type_words(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Return a type in words, with the bounds in its metadata: "integer above 0, or null"."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_words(arguments[0], [*metadata, *constraints_of(arguments[1:])])
    if origin in (Union, UnionType):
        return ", or ".join(
            type_words(each, () if each is NoneType else metadata) for each in arguments
        )
    return f"{plain_words(annotation)} {' and '.join(bound_words(metadata))}".strip()


def plain_words(annotation: Any) -> str:
    """Return a type in words, without bounds of its own."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is list:
        return f"list of {type_words(arguments[0])}"
    if origin is tuple:
        return f"list of {len(arguments)} {type_words(arguments[0])}s"
    if origin is dict:
        return f"mapping of {type_words(arguments[0])} to {type_words(arguments[1])}"
    return NAMES[annotation]


def constraints_of(metadata: Sequence[Any]) -> list[Any]:
    """Return the constraints in an annotation's metadata, those inside pydantic's Field included."""
    constraints: list[Any] = []
    for each in metadata:
        constraints += each.metadata if isinstance(each, FieldInfo) else [each]
    return constraints


def bound_words(constraints: Sequence[Any]) -> list[str]:
    """Return the numeric bounds in words."""
    found = []
    for constraint in constraints:
        for name, words in BOUNDS.items():
            value = getattr(constraint, name, None)
            if (
                value is not None and value != 2**63
            ):  # the range of a 64-bit integer goes without saying
                found.append(f"{words} {value}")
    return found


def with_unit(name: str, words: str) -> str:
    if words == NAMES[bool]:
        return words
    for ending, unit in UNITS.items():
        if name.endswith(ending):
            return f"{words}; {unit}"
    return words


def default_of(field: FieldInfo) -> str:
    """Return the default as YAML in code, "required", or nothing for a section of defaults."""
    if field.default is PydanticUndefined:
        return "required"
    value = field.default
    if isinstance(value, BaseModel):
        tags = (
            [tag_of(type(value))]
            if any(is_tag(each) for each in type(value).model_fields.values())
            else []
        )
        return f"`{tags[0]}`" if tags else ""
    if isinstance(value, str):
        return f"`{value}`" if value else "`''`"
    return f"`{json.dumps(value)}`"


def docstring(section: type[BaseModel]) -> str:
    return clean(section.__doc__ or "")


# --- commands


def commands_page() -> str:
    """Return the page of all commands with their arguments and options, and of other programs."""
    parts = [COMMANDS]
    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        arguments = [each for each in command.params if each.param_type_name == "argument"]
        options = [
            each
            for each in command.params
            if each.param_type_name == "option" and each.name != "help"
        ]
        usage = " ".join(["spiral-mega", name, *(_usage(each) for each in arguments)])
        parts += [
            f"## {name}",
            f"    {usage}{' [OPTIONS]' if options else ''}",
            clean(command.help or ""),
        ]
        rows = [(f"`{_usage(each)}`", "", each.help) for each in arguments]
        rows += [(_option(each), _default(each), each.help) for each in options]
        parts.append(table(("argument or option", "default", "meaning"), rows))
    rows = [
        (f"`{_module_command(path)}`", first_sentence(ROOT / path))
        for path in PROGRAMS
        if _is_program(path)
    ]
    parts += [
        "## Other programs",
        "Each prints its options with `--help`.",
        table(("program", "purpose"), rows),
    ]
    return "\n\n".join(parts) + "\n"


def _usage(argument: Any) -> str:
    metavar = {"settings": "[FILE]_[KEY=VALUE...]", "overrides": "[KEY=VALUE...]", "runs": "RUN..."}
    return metavar.get(argument.name, argument.name.upper()).replace("_", " ")


def _option(option: Any) -> str:
    names = [*option.opts, *option.secondary_opts]
    return ", ".join(f"`{name}`" for name in names)


def _default(option: Any) -> str:
    if option.required:
        return "required"
    if (
        option.default is None
        or option.default is False
        or option.default == ""
        or option.name == "python"
    ):
        return ""
    return f"`{json.dumps(option.default) if not isinstance(option.default, (str, Path)) else option.default}`"


def _is_program(path: str) -> bool:
    return "__main__" in (ROOT / path).read_text() or path.endswith("__main__.py")


def _module_command(path: str) -> str:
    module = path.removesuffix(".py").removesuffix("/__main__").replace("/", ".")
    return f"python {path}" if path.startswith("tools/") else f"python -m {module}"


def first_sentence(path: Path) -> str:
    """Return the first paragraph of a module's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return clean(text.split("\n\n")[0])


# --- Markdown


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [row(header), row(("---",) * len(header)), *(row(each) for each in rows)]
    return "\n".join(lines)


def row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


def clean(text: str) -> str:
    """Return paragraphs with their lines joined."""
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)


def anchor(heading: str) -> str:
    """Return GitHub's anchor of a heading."""
    return "".join(c for c in heading.lower().replace(" ", "-") if c.isalnum() or c in "-_")


if __name__ == "__main__":
    main()
