"""`spiral-mega report`: several runs as one HTML page that needs no network and no other file.

static/index.html has these placeholders:
    {{title}} {{style}} {{script}}   the page's title, its CSS, and the scripts in order
    {{data}}                         metrics, evaluations and index of episodes, unpacked at once
    {{blocks}}                       whole episodes; a block is unpacked when one of them is shown
"""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from spiral_mega.errors import UserError
from spiral_mega.report.page_data import read_page_data, rounded
from spiral_mega.report.page_episodes import EpisodeBlocks
from spiral_mega.telemetry.atomic import atomic_path

SCRIPTS = (
    "dom.js",
    "charts.js",
    "training.js",
    "evaluation.js",
    "analysis.js",
    "episodes.js",
    "app.js",
)


def write_report(folders: Sequence[Path], output: Path, *, max_traces: int = 10_000) -> None:
    """Write the report of the runs in `folders`. Raises UserError for a folder with nothing to show."""
    if missing := [str(folder) for folder in folders if not folder.is_dir()]:
        raise UserError(
            f"{missing[0]} is not a folder: name the folders of runs, such as runs/demo"
        )
    blocks = EpisodeBlocks()
    data = read_page_data(folders, blocks, max_traces)
    names = ", ".join(run["name"] for run in data["runs"])
    page = render(data, rounded(blocks.blocks), f"spiral_mega: {names}")
    with atomic_path(output) as path:
        path.write_text(page, encoding="utf-8")


def render(data: dict[str, Any], blocks: Sequence[Any], title: str) -> str:
    """Return the page. Data is base64 of gzipped JSON, so that no text in it can end its element."""
    elements = []
    for i, block in enumerate(blocks):
        elements.append(f'<script type="text/plain" id="block-{i}">{packed(block)}</script>')
    parts = {
        "title": html.escape(title),
        "style": _read_static("style.css"),
        "script": "\n".join(map(_read_static, SCRIPTS)),
        "data": packed(data),
        "blocks": "\n".join(elements),
    }
    page = _read_static("index.html")
    for name, text in parts.items():
        page = page.replace("{{" + name + "}}", text)
    return page


def packed(value: Any) -> str:
    """Pack a value for `unpack` in dom.js: gzipped JSON in base64. Equal values give equal text."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode("ascii")


def _read_static(name: str) -> str:
    return (files("spiral_mega.report") / "static" / name).read_text(encoding="utf-8")
