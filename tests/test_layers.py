"""An import never goes up: each package and module imports only from layers below its own.

Imports under TYPE_CHECKING do not count, since nothing is imported at run time. Imports inside functions do.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "spiral_mega"

# From low to high. Members of one layer do not import each other.
LAYERS = (
    ("errors", "seeds", "traces"),
    ("distributed",),
    ("process",),
    ("config",),
    ("kernels", "packing"),
    ("rewards", "environments", "prompts"),
    ("algorithm",),
    ("models",),
    ("telemetry",),
    ("data",),
    ("policy",),
    ("rollout",),
    ("checkpoint",),
    ("conversion",),
    ("statistics",),
    ("analysis",),
    ("evaluation",),
    ("validation",),
    ("simulation",),
    ("capacity",),
    ("report",),
    ("reproduction", "doctor", "launch"),
    ("run",),
    ("train", "filter", "evaluate"),
    ("cli",),
    ("__main__",),
)
LEVEL = {name: level for level, layer in enumerate(LAYERS) for name in layer}


def package_files() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_layers(tree: ast.AST) -> Iterator[str]:
    """Yield the layer of each import of this package that happens at run time."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.ImportFrom) and node.module == "spiral_mega":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("spiral_mega."):
            yield str(node.module).split(".")[1]
        elif isinstance(node, ast.Import):
            yield from (
                alias.name.split(".")[1]
                for alias in node.names
                if alias.name.startswith("spiral_mega.")
            )
        yield from imported_layers(node)


def violations() -> set[tuple[str, str]]:
    found = set()
    for path in package_files():
        own = layer_of(path)
        for imported in imported_layers(ast.parse(path.read_text())):
            if imported != own and LEVEL[imported] >= LEVEL[own]:
                found.add((str(path.relative_to(PACKAGE)), imported))
    return found


def test_every_module_has_a_layer():
    assert {layer_of(path) for path in package_files()} == set(LEVEL)


def test_no_import_goes_up():
    assert violations() == set()


@pytest.mark.parametrize(
    ("source", "layers"),
    [
        ("from spiral_mega import cli", ["cli"]),
        ("import spiral_mega.run", ["run"]),
        ("def f():\n    from spiral_mega.run import Run", ["run"]),
        ("if TYPE_CHECKING:\n    from spiral_mega.run import Run", []),
        ("import torch\nfrom collections import Counter", []),
    ],
)
def test_imports_are_recognized(source: str, layers: list[str]) -> None:
    assert list(imported_layers(ast.parse(source))) == layers
