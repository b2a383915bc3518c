"""The findings of the checks, and their report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "error"]
MARKS = {"ok": "  ok  ", "warning": " WARN ", "error": " FAIL "}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check; `text` gives the state and, for a warning or an error, the remedy.

    An error would stop or spoil a run.
    """

    level: Level
    subject: str
    text: str


def ok(subject: str, text: str) -> Finding:
    return Finding("ok", subject, text)


def warning(subject: str, text: str) -> Finding:
    return Finding("warning", subject, text)


def error(subject: str, text: str) -> Finding:
    return Finding("error", subject, text)


def format_report(findings: Sequence[Finding]) -> str:
    """Return one line for each finding, then the numbers of errors and warnings."""
    lines = [f"{MARKS[finding.level]} {finding.subject}: {finding.text}" for finding in findings]
    errors = sum(finding.level == "error" for finding in findings)
    warnings = sum(finding.level == "warning" for finding in findings)
    lines.append(f"\n{errors or 'nothing'} to fix, {warnings} warnings")
    return "\n".join(lines)
