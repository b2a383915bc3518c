"""One line of the doctor's report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """`text` says how it is, and where that is not well, what to do. An `error` would stop or spoil a run."""

    level: Level
    subject: str
    text: str


def ok(subject: str, text: str) -> Finding:
    return Finding("ok", subject, text)


def warning(subject: str, text: str) -> Finding:
    return Finding("warning", subject, text)


def error(subject: str, text: str) -> Finding:
    return Finding("error", subject, text)
