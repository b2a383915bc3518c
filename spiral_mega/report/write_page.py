"""`spiral-mega report`: several runs as one HTML page that needs no network and no other file."""

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
from spiral_mega.report.collect import collect, rounded
from spiral_mega.report.episodes import Blocks
from spiral_mega.telemetry.atomic import atomic_path

SCRIPTS = ("dom.js", "charts.js", "training.js", "evaluation.js", "analysis.js", "episodes.js", "app.js")


def write_report(folders: Sequence[Path], output: Path, *, max_traces: int = 10_000) -> None:
    """Write the report of the runs in `folders` to `output`. Raises UserError for a folder with nothing to show."""
    if missing := [str(folder) for folder in folders if not folder.is_dir()]:
        raise UserError(f"{missing[0]} is no folder: name the folders of runs, such as runs/demo")
    blocks = Blocks()
    report = collect(folders, blocks, max_traces)
    names = ", ".join(run["name"] for run in report["runs"])
    page = render(report, rounded(blocks.blocks), f"spiral_mega: {names}")
    with atomic_path(output) as path:
        path.write_text(page, encoding="utf-8")


def render(report: dict[str, Any], blocks: Sequence[Any], title: str) -> str:
    """The page. Data is embedded as base64 of gzipped JSON, so that nothing in it can end the element that holds it."""
    parts = {
        "title": html.escape(title),
        "style": _part("style.css"),
        "script": "\n".join(_part(name) for name in SCRIPTS),
        "data": packed(report),
        "blocks": "\n".join(
            f'<script type="text/plain" id="block-{i}">{packed(block)}</script>' for i, block in enumerate(blocks)
        ),
    }
    page = _part("index.html")
    for name, text in parts.items():
        page = page.replace("{{" + name + "}}", text)
    return page


def packed(value: Any) -> str:
    """What `unpack` in dom.js reads; the same bytes for the same value."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode("ascii")


def _part(name: str) -> str:
    return (files("spiral_mega.report") / "static" / name).read_text(encoding="utf-8")
