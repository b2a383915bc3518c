"""Links between pages resolve, and the files, modules and configuration keys that pages name exist."""

import re
from functools import cache
from pathlib import Path

import pytest
from pydantic import BaseModel

from spiral_mega.config import Config
from tests.test_texts import sections_in
from tools.write_reference import anchor

PAGES = sorted([*map(Path, ("README.md", "CONTRIBUTING.md")), *Path("docs").rglob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
# Where a path in a page may start: pages name files of the package, of its tests and of the repository.
ROOTS = [Path(), Path("spiral_mega"), Path("tests")]
# Files that a reader or a run writes.
WRITTEN = re.compile(
    r"^(mine|runs|run\.dir|exported|logs)/|^(records|traces|model|checkpoints)/$|^(include:|other\.yaml|run\.yaml|config\.yaml)$"
    r"|configs/(mine|x)\.yaml$|ranked\.(py|yaml)$"
)
SUFFIXES = (".py", ".yaml", ".md", ".sh", ".sbatch")


def headings(page: Path) -> set[str]:
    lines = FENCED.sub("", page.read_text()).splitlines()
    return {
        anchor(line.lstrip("#").strip().replace("`", "")) for line in lines if line.startswith("#")
    }


@cache
def tracked() -> list[Path]:
    skipped = {".git", ".venv", "runs", "models", "__pycache__"}
    return [path for path in Path().rglob("*") if not skipped & set(path.parts)]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_resolve(page: Path) -> None:
    broken = []
    for target in LINK.findall(FENCED.sub("", page.read_text())):
        if re.match("https?:", target):
            continue
        name, _, section = target.partition("#")
        path = page if not name else page.parent / name
        if not path.exists() or (section and section not in headings(path)):
            broken.append(target)
    assert broken == []


def exists(name: str) -> bool:
    """Return whether a page's path is a file or folder: below one of the roots, or by its unique name."""
    if any(any(root.glob(name)) for root in ROOTS):
        return True
    name = name.rstrip("/")
    return "/" not in name and any(path.name == name for path in tracked())


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_named_files_exist(page: Path) -> None:
    text = FENCED.sub("", page.read_text())
    names = [
        name
        for code in CODE.findall(text)
        for name in code.replace("{", " ").replace("}", " ").split()
    ]
    files = [
        name
        for name in names
        if name.endswith(SUFFIXES) or (name.endswith("/") and "/" not in name[:-1])
    ]
    missing = [name for name in files if not WRITTEN.search(name) and not exists(name.rstrip(",;"))]
    assert missing == []


def config_keys(section: type[BaseModel], prefix: str = "") -> set[str]:
    keys = set()
    for name, field in section.model_fields.items():
        keys.add(prefix + name)
        for inner in sections_in(field.annotation):
            keys |= config_keys(inner, f"{prefix}{name}.")
    return keys


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_named_configuration_keys_exist(page: Path) -> None:
    """A dotted name in code that starts with a section of the configuration is one of its keys."""
    known = config_keys(Config)
    sections = "|".join(Config.model_fields)
    found = set()
    for code in CODE.findall(page.read_text()):
        for key in re.findall(rf"(?<![\w./-])(?:{sections})(?:\.[a-z_0-9]+)+(?![\w/(]|\.<)", code):
            found.add(re.sub(r"\.\d+", "", key))  # positions in lists
    free = ("algorithm.options.", "eval.harnesses.", "run.dir")
    files = (".py", ".md", ".yaml", ".json", ".jsonl")
    assert {
        key for key in found - known if not key.startswith(free) and not key.endswith(files)
    } == set()


def test_the_index_lists_every_page() -> None:
    index = (Path("docs") / "README.md").read_text()
    pages = [
        page.relative_to("docs")
        for page in PAGES
        if page.parts[0] == "docs" and page.name != "README.md"
    ]
    assert [str(page) for page in pages if f"({page})" not in index] == []


def test_the_readme_is_short() -> None:
    assert len(Path("README.md").read_text().splitlines()) < 150
