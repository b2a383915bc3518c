"""The committed reference pages are what tools/write_reference.py writes, and know every key and command."""

import pytest

from spiral_mega.config import Config
from spiral_mega.validation.load import load_config
from tools.write_reference import FOLDER, commands_page, configuration_page, type_words


@pytest.mark.parametrize(
    ("name", "write"), [("configuration.md", configuration_page), ("commands.md", commands_page)]
)
def test_the_committed_page_is_what_the_code_says(name, write):
    assert (FOLDER / name).read_text() == write(), "run make reference"


def resolved_keys(values, key=""):
    """Every key of a resolved configuration, dotted, without what lies in lists and free mappings."""
    for name, value in values.items():
        yield key + name
        if isinstance(value, dict) and name not in (
            "options",
            "dimensions",
            "chat_template_kwargs",
        ):
            yield from resolved_keys(value, f"{key}{name}.")


def test_every_key_of_a_resolved_configuration_is_under_its_heading():
    page = (FOLDER / "configuration.md").read_text()
    config: Config = load_config("configs/recipes/grpo_kl.yaml")
    for key in resolved_keys(config.model_dump(mode="json")):
        section, _, name = key.rpartition(".")
        if key == "algorithm.loss.name":
            assert "**name = ppo_clip**" in page
        elif section:
            part = page.split(f"# {section}\n")[1].split("\n#")[0]
            assert f"| `{name}` |" in part, key
        else:
            assert f"\n## {name}\n" in page, key


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("seed", "integer at least 0"),
        ("hang_minutes", "number above 0"),
        ("resume", "`auto`, `never`"),
    ],
)
def test_types_and_bounds_are_in_words(key, words):
    field = Config.model_fields["run"].annotation.model_fields[key]
    assert type_words(field.annotation, field.metadata) == words
