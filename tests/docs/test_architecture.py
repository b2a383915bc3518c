"""docs/design/architecture.md names every package, and its layers are those that tests/test_layers.py enforces."""

import re
from pathlib import Path

from tests.test_layers import LAYERS

PAGE = Path("docs/design/architecture.md").read_text()


def test_every_package_has_a_question() -> None:
    table = PAGE.split("## Packages")[1].split("## Layers")[0]
    packages = [path.parent.name for path in Path("spiral_mega").glob("*/__init__.py")]
    assert [name for name in packages if not re.search(rf"`{name}/", table)] == []


def test_the_layers_are_those_that_are_enforced() -> None:
    lines = [
        line.strip() for line in PAGE.split("## Layers")[1].splitlines() if line.startswith("    ")
    ]
    assert lines == [", ".join(layer) for layer in LAYERS]
